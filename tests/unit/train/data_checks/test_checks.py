"""What a check finds in a file, and that it says on which line."""

import json
import subprocess

import numpy as np
import pytest

from tests.train_support.tiny import gsm8k
from tests.unit.train.data_checks.made import chat, checked, scanned, write
from train.data_checks import likeness
from train.data_checks.languages import Languages
from train.data_checks.lengths import curve
from train.data_checks.options import BadOption, CheckOptions
from train.data_checks.process import CheckFailed, answer_of, command_of
from train.data_checks.scan import Source
from train.data_checks.words import grams, words_of

LONG = "The quick brown fox jumps over the lazy dog while the old man reads his newspaper under a tree in the park."


def lines(report, name):
    return [one["line"] for one in report["checks"][name]["first"]]


def test_every_check_names_the_lines(tmp_path):
    valid = write(tmp_path / "valid.jsonl", chat("And now?", LONG.replace("old", "young") + " It is late."))
    path = write(
        tmp_path / "train.jsonl",
        chat("What is 2 + 2?", LONG),
        {"messages": list(reversed(chat("x", "y")["messages"]))[:1], "tools": []} | chat("What is 2 + 2?", LONG),
        chat("What is 2 + 2?", LONG.replace("park", "wood")),
        chat("Hi", " "),
        "{no json",
        chat("Who?", "Ann, ann@example.org, card 4111 1111 1111 1111"),
        chat("How?", "Itâ€™s like this, said the man in the quiet room."),
        chat("And now?", LONG.replace("old", "young") + " It is early."),
        chat("Swear", "oh shit, that is not what I had wanted to say"),
    )
    report = checked(path, against=valid, max_tokens=30)
    assert {name: lines(report, name) for name in report["checks"]} == {
        "bad_lines": [5],
        "empty": [4],
        "encoding": [7],
        "duplicates": [2],
        "near_duplicates": [3],
        "too_long": [1, 2, 3, 8],
        "contaminated": [8],
        "language": [],
        "personal_data": [6],
        "toxic": [9],
    }
    assert not report["usable"] and report["examples"] == 9
    assert report["checks"]["personal_data"]["kinds"] == {"email": 1, "card": 1}
    assert "ann@example.org" not in json.dumps(report) and report["checks"]["contaminated"]["first"][0]["of"] == 1


def test_chinese_that_was_read_as_latin_1_is_oddly_encoded(tmp_path):
    path = write(
        tmp_path / "f.jsonl",
        chat("Who?", "我是小云，由云山科技制造。"),
        chat("Who?", "我是小云，由云山科技制造。".encode("gbk").decode("latin1")),
        chat("Which umlauts?", "ÄÖÜäöüß, as in Crème brûlée; ÷÷÷÷÷÷÷÷"),
    )
    found = checked(path)["checks"]["encoding"]
    assert (found["kinds"], [one["line"] for one in found["first"]]) == ({"chinese": 1}, [2])


def test_duplicates_are_what_a_job_would_learn_twice(tmp_path):
    """Another order of the keys, other spaces, another shape of the same conversation in it: the same example."""
    one = chat("What is it?", "It is a very long story that nobody has told before, and nobody will tell again.")
    path = write(
        tmp_path / "f.jsonl", one, json.dumps(one, indent=None, separators=(",", ":")), {**one, "metadata": {"n": 1}}
    )
    found = checked(path)["checks"]["duplicates"]
    assert [(one["line"], one["of"]) for one in found["first"]] == [(2, 1), (3, 1)]


def test_other_shapes_and_several_files(tmp_path):
    a = write(tmp_path / "a.jsonl", {"question": "Who is it that sings so late?", "answer": "It is the nightingale."})
    b = write(
        tmp_path / "b.jsonl", {"instruction": "Who is it that sings so late?", "output": "It is the nightingale."}
    )
    pairs = write(tmp_path / "p.jsonl", {"prompt": "Who?", "chosen": "I", "rejected": ""})
    found = checked(a, b)["checks"]["duplicates"]["first"]
    assert found == [{"source": str(b), "line": 1, "of": 1, "of_source": str(a)}]
    report = checked(pairs)
    assert lines(report, "empty") == [1] and report["files"][0]["shape"] == "preference"


def test_report_counts_keys_that_are_left_out(tmp_path):
    row = chat("Who is it?", "It is the nightingale.")
    path = write(tmp_path / "f.jsonl", {**row, "source": "x"}, {**row, "source": None, "id": 3})
    assert checked(path)["keys_left_out"] == {"id": 1, "source": 1}


def test_an_array_and_windows_lines(tmp_path):
    array = tmp_path / "a.json"
    array.write_text(json.dumps([chat("a b c", "d e f"), chat("a b c", "d e f")], indent=1))
    assert checked(array)["checks"]["duplicates"]["count"] == 1
    crlf = tmp_path / "c.jsonl"
    crlf.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(chat("a b c", "d e f")).encode() for _ in range(2)))
    assert checked(crlf)["checks"]["duplicates"]["count"] == 1


def test_a_template_that_all_share_gives_nothing_away(tmp_path):
    template = "You are given a sum of two numbers from a school book; say what it makes and nothing else, please: "
    valid = write(tmp_path / "v.jsonl", *(chat(f"{template} {n} and {n + 1}", str(2 * n + 1)) for n in range(50)))
    train = write(tmp_path / "t.jsonl", *(chat(f"{template} {n} and {n + 5}", str(2 * n + 5)) for n in range(50)))
    assert checked(train, against=valid)["checks"]["contaminated"]["count"] == 0
    assert checked(valid, against=valid)["checks"]["contaminated"]["count"] == 50


def test_languages(tmp_path):
    english = [
        chat(f"Question {n}", f"This is the answer to question number {n}, which was asked today.") for n in range(99)
    ]
    path = write(
        tmp_path / "f.jsonl", *english, chat("Frage", "Das ist die Antwort auf eine Frage, die gestellt wurde.")
    )
    report = checked(path)
    assert report["languages"]["en"] >= 95 and report["languages"]["de"] == 1 and lines(report, "language") == [100]


def test_chinese_without_kana_is_not_taken_for_japanese():
    languages = Languages()
    for text in (
        "摄像头的保修期是两年,从购买之日算起,保修期内免费维修。",
        "路由器的保修期是两年,从购买之日算起,请妥善保管发票。",
    ):
        assert languages.of(text) == "zh"
    assert languages.of("保証期間は購入日から二年間ですので、領収書を大切に保管してください。") == "ja"
    assert languages.of("The warranty is two years from the day of purchase.") == "en"


@pytest.mark.parametrize(
    "text",
    [
        "68f2ca8425c9abe96d550b9144859afa26476fb7d839fbfb99b4f6e1c3981ebc",
        "500130 9690 761 948692 61177 45248 99 4927 402523 350 903 73 7 5 3995",
        "669 | 604 | 528 | 311 | 679 | 793 | 54 | 788 | 201 | 276 | 417 | 268 | 850 | 749 | 32",
    ],
)
def test_what_is_no_language_is_not_taken_for_chinese(text):
    assert Languages().of(text) == "unsure"


def test_an_insult_in_one_language_is_a_word_of_another(tmp_path):
    """Swedish `hora`, Spanish hour."""
    path = write(
        tmp_path / "f.jsonl",
        *(chat("¿Y?", "Es la hora de comer en la casa de mis padres, dijo el niño.") for _ in range(2)),
    )
    assert checked(path)["checks"]["toxic"]["count"] == 0
    listed = tmp_path / "own.txt"
    listed.write_text("mis padres\n\nx\n")
    assert checked(path, words=listed)["checks"]["toxic"]["kinds"] == {"mis padres": 2}


def test_words_in_scripts_without_spaces():
    assert len(words_of("我爱北京 ok, OK!")) == 6 and words_of("Straße")[0] == words_of("STRASSE".replace("SS", "ß"))[0]
    assert len(words_of("")) == len(words_of("… — ，。!")) == 0
    few = words_of("one two")
    assert len(grams(few, 5)) == 1 and grams(few, 5)[0] == grams(few, 2)[0]
    assert (grams(words_of("a b c d e f"), 5)[1:] == grams(words_of("b c d e f"), 5)).all()


def test_the_curve_of_lengths():
    drawn = curve(np.array([10] * 50 + [100] * 10 + [1000]))
    assert (drawn["shortest"], drawn["p50"], drawn["longest"]) == (10, 10, 1000)
    assert drawn["curve"][0] == "█" and drawn["curve"][-1] == "▁" and len(drawn["curve"]) == 24
    assert curve(np.array([], np.uint32)) == {} and curve(np.array([7]))["longest"] == 7


def test_options_that_make_no_sense(tmp_path):
    path = write(tmp_path / "f.jsonl", chat("a", "b"))
    for wrong in ({"leave_out": ["speling"]}, {"like": 0.2}, {"max_tokens": 0}):
        with pytest.raises(BadOption):
            CheckOptions(**wrong)
    with pytest.raises(BadOption, match="'poetry'"):
        checked(path, method="poetry")
    with pytest.raises(BadOption, match="no tokenizer"):
        checked(path, model=tmp_path)
    assert lines(checked(path, method="dpo"), "bad_lines") == [1]


def test_in_a_process_of_its_own(tmp_path):
    def apart(path):
        done = subprocess.run(command_of({"files": [str(path)], "check": {}}), capture_output=True)
        return answer_of(done.returncode, done.stdout, done.stderr)

    assert apart(gsm8k(tmp_path / "f.jsonl", "train", 20))["examples"] == 20
    with pytest.raises(CheckFailed, match="nowhere"):
        apart(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "line",
    [
        b"x" * (17 << 20),
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": "' + b"\xff" * 1000 + b'"}',
        json.dumps(chat("q", "a1 " * 2_000_000)).encode(),
        json.dumps(chat("q", "+1 (" * 1_500_000)).encode(),
    ],
    ids=["long", "nested", "not utf-8", "words", "digits"],
)
def test_a_hostile_line_costs_what_it_weighs(tmp_path, line):
    path = tmp_path / "f.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(chat("a b", "c d")).encode() + b"\n")
    report = checked(path)
    assert report["examples"] == 2 and report["checks"]["bad_lines"]["count"] in (0, 1)


def test_short_examples_that_share_a_band_with_a_long_one_do_not_have_it_read_again(tmp_path, monkeypatch):
    """The permutations are known, so whoever has the words with the smallest values of a text shares its bands."""
    whole = " ".join(f"w{n}" for n in range(3000))
    path = write(tmp_path / "f.jsonl", chat("", whole), *(chat("", f"w{n} w{n + 1} w{n + 2}") for n in range(200)))
    monkeypatch.setattr(likeness, "bands_of", lambda grams: np.ones(likeness.BANDS, np.uint32))
    read = []
    raw = Source.raw
    monkeypatch.setattr(Source, "raw", lambda self, *place: read.append(place) or raw(self, *place))
    assert scanned(path).found["near_duplicates"].count == 0
    longest = [place for place in read if place[1] > 3000]
    assert longest == [] and len(read) < 5 * 200


def test_a_tokenizer_that_names_other_files_is_not_opened_to_count_tokens(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"vocab": "/box/first-key"}))
    with pytest.raises(BadOption, match="tokenizer_config.json: has 'vocab'"):
        checked(model=tmp_path)
