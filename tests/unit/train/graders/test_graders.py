"""Graders: parsing, named refusals and rewards."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader
from train.graders.graders import ModelAnswer, Multi, ScoreModel, leaves, parse
from train.graders.grading import Graded, grade, requests
from train.graders.similarity import METRICS, similarity
from train.graders.templates import MAX_TEXT, Sample, fill

CHECK = {"type": "string_check", "name": "same", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
SCORE = {
    "type": "score_model",
    "name": "judge",
    "model": "starter",
    "range": [0, 10],
    "input": [
        {"role": "system", "content": "Grade."},
        {"role": "user", "content": [{"type": "input_text", "text": "{{ item.question }}"}, "{{sample.output_text}}"]},
    ],
    "sampling_params": {"temperature": 0, "max_completions_tokens": 99, "seed": 4},
}
LABEL = {
    "type": "label_model",
    "name": "kind",
    "model": "starter",
    "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}


def no_python(source: str, sample: dict, item: object) -> float:
    raise AssertionError("no code is run here")


def graded(given: object, text: str, item: object = None, answers: dict | None = None) -> Graded:
    return grade(parse(given), Sample(text), item, answers or {}, no_python)


@pytest.mark.parametrize(
    ("operation", "text", "answer", "reward"),
    [
        ("eq", "Paris", "Paris", 1),
        ("eq", "Paris", "paris", 0),
        ("ne", "Paris", "Lyon", 1),
        ("like", "It is PARIS.", "Paris", 0),
        ("ilike", "It is PARIS.", "Paris", 1),
    ],
)
def test_string_check_compares_strings(operation: str, text: str, answer: str, reward: float) -> None:
    found = graded({**CHECK, "operation": operation}, text, {"answer": answer})
    assert (found.reward, found.passed, found.errors) == (reward, reward == 1, GradingErrors())


def test_templates_read_nested_items_and_samples() -> None:
    sample = Sample('{"steps": [{"n": 7}]}', [{"id": "call_1"}])
    item = {"a": {"b": [1, {"c d": "x"}]}, "zh": "你好", "'q'": "quoted"}
    assert fill("""{{ item["'q'"] }} {{ '{{' }} {{ "}}" }}""", sample, item) == "quoted {{ }}"
    assert fill("{{item.a.b.0}} {{ item.a['b'][1]['c d'] }} {{item.zh}}", sample, item) == "1 x 你好"
    assert fill("{{ sample.output_json.steps[0].n }}", sample, item) == "7"
    assert fill("{{sample.output_tools}}", sample, item) == '[{"id": "call_1"}]'
    assert fill("{{sample.choices.0.message.content}} {not one}", Sample("hi"), None) == "hi {not one}"


@pytest.mark.parametrize(
    "text, said, called",
    [
        ('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "I look.", [("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"b": "é"}}',
            "",
            [("f", {}), ("g", {"b": "é"})],
        ),
        ('{"name": "f", "parameters": {"a": [2]}}', "", [("f", {"a": [2]})]),
        ("<tool_call>{no json}</tool_call>", None, []),
        ("[" * 100_000, None, []),
    ],
)
def test_sample_parses_tool_calls_in_answer(text, said, called):
    found = Sample.with_calls(text)
    assert found.output_text == (text if said is None else said)
    calls = [call["function"] for call in found.output_tools]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == called


def test_request_messages_have_total_size_limit() -> None:
    part = {"role": "user", "content": "{{ item }}"}
    judge = parse({"type": "score_model", "name": "j", "model": "m", "input": [part, part]})
    assert isinstance(judge, ScoreModel) and judge.request(Sample(""), "a")["messages"][1]["content"] == "a"
    with pytest.raises(GradingFailed, match="a prompt has over"):
        judge.request(Sample(""), "a" * (MAX_TEXT // 2 + 1))


@pytest.mark.parametrize("variable", ["item.b", "item.a.x", "item.a.9", f"item.a.{'9' * 200}", "sample.choices.1"])
def test_template_with_missing_value_names_it(variable: str) -> None:
    with pytest.raises(GradingFailed, match=r"has no value: '\w+' is missing") as failure:
        fill(f"{{{{ {variable} }}}}", Sample(""), {"a": [1]})
    of_the_answer = variable.startswith("sample")
    assert failure.value.errors == GradingErrors(
        sample_parse_error=of_the_answer, invalid_variable_error=not of_the_answer
    )


def test_graders_of_openai_guides_parse_unchanged() -> None:
    code = {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return 1.0"}
    assert parse({**code, "image_tag": "2025-05-08"}).name == "p"
    judge = parse({**LABEL, "sampling_params": {"max_tokens": 32768, "top_p": 1, "seed": 42}})
    (body,) = requests(judge, Sample("good"), {"answer": "4"}).values()
    assert body["max_completion_tokens"] == 32768
    check = {"type": "string_check", "operation": "eq", "reference": "{{sample.output_tools[0].function.name}}"}
    calls = {
        "type": "multi",
        "name": "both",
        "graders": {
            "called": {**check, "input": "get_acceptors"},
            "argument": {
                **check,
                "input": "{{ item.smiles }}",
                "reference": "{{sample.output_tools[0].function.arguments.smiles}}",
            },
        },
        "calculate_output": "0.5 * called + 0.5 * argument",
    }
    call = {"type": "function", "function": {"name": "get_acceptors", "arguments": '{"smiles": "CCO"}'}}
    told = grade(parse(calls), Sample("", [call]), {"smiles": "CCO"}, {}, no_python)
    assert told.reward == 1 and list(leaves(parse(calls))) == ["called", "argument"]
    call["function"] = {"name": "get_acceptors", "arguments": "no json"}
    told = grade(parse(calls), Sample("", [call]), {"smiles": "CCO"}, {}, no_python)
    assert told.reward == 0 and told.errors == GradingErrors(sample_parse_error=True), "the answer's fault"


EQUAL = {**CHECK, "operation": "eq"}
REFUSED = {
    "no name": ({"type": "string_check", "operation": "eq", "input": "", "reference": ""}, "name"),
    "no name in a list": (
        {"type": "multi", "name": "m", "calculate_output": "1", "graders": [{"type": "python", "source": "def grade"}]},
        "graders.0.name",
    ),
    "no object": (3, ""),
    "a field too many": ({**EQUAL, "weight": 2}, "weight"),
    "an operation": ({**CHECK, "operation": "equals"}, "operation"),
    "a filter": ({**EQUAL, "input": "{{item.a|upper}}"}, "input"),
    "a part's variable": (
        {**SCORE, "input": [{"role": "user", "content": ["x", {"type": "input_text", "text": "{{ a }}"}]}]},
        "input.0.content.1.text",
    ),
    "no end": ({**EQUAL, "input": "{{ item.answer }"}, "input"),
    "a sum": ({**EQUAL, "input": "{{ item.a + 1 }}"}, "input"),
    "an escape": ({**EQUAL, "input": r"{{ 'a\nb' }}"}, "input"),
    "an escape in a name": ({**EQUAL, "input": r"{{ item['it\'s'] }}"}, "input"),
    "space control": ({**EQUAL, "input": "{{- item.a -}}"}, "input"),
    "too many variables": ({**EQUAL, "input": "{{ item.a }}" * 1001}, ""),
    "a long path": ({**EQUAL, "input": f"{{{{ item{'.a' * 65} }}}}"}, "input"),
    "a grader named as a type": (
        {
            "type": "multi",
            "name": "m",
            "calculate_output": "python",
            "graders": {"python": {**EQUAL, "input": "{{ a }}"}},
        },
        "graders.python.input",
    ),
    "a sample's field": ({**EQUAL, "input": "{{sample.text}}"}, "input"),
    "cosine": (
        {"type": "text_similarity", "name": "x", "input": "", "reference": "", "evaluation_metric": "cosine"},
        "evaluation_metric",
    ),
    "an image": (
        {**SCORE, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content",
    ),
    "a threshold out of reach": ({**SCORE, "pass_threshold": 11}, "pass_threshold"),
    "a threshold of a range upside down": ({**SCORE, "range": [10, 0], "pass_threshold": 5}, "range"),
    "a strange label": ({**LABEL, "passing_labels": ["fine"]}, "passing_labels"),
    "a long source": ({"type": "python", "name": "x", "source": "def grade" + "x" * (2 << 20)}, ""),
}


@pytest.mark.parametrize(("given", "param"), REFUSED.values(), ids=REFUSED)
def test_invalid_grader_names_param(given: object, param: str) -> None:
    with pytest.raises(InvalidGrader) as refusal:
        parse(given)
    assert refusal.value.param == param and refusal.value.message


@pytest.mark.parametrize("how", ["by name", "as a list", "alone"])
def test_multi_grader_accepts_three_shapes(how: str) -> None:
    graders = {"by name": {"same": EQUAL}, "as a list": [EQUAL], "alone": EQUAL}[how]
    given = {"type": "multi", "name": "m", "calculate_output": "2 * same - 0.5", "graders": graders}
    found = graded(given, "4", {"answer": "4"})
    assert (found.reward, found.sub_rewards) == (1.5, {"same": 1.0})
    # `as_given` keeps the submitted form, because the type in OpenAI's SDK permits a single grader.
    assert parse(given).as_given() == given


def multi(formula: str, *names: str) -> Multi:
    leaves = {name: EQUAL for name in names or ("a", "b")}
    made = parse({"type": "multi", "name": "m", "graders": leaves, "calculate_output": formula})
    assert isinstance(made, Multi)
    return made


@pytest.mark.parametrize(
    "text",
    ["same +", "other", "__import__('os')", "same.real", "True", "(" * 3000 + "same" + ")" * 3000, "same" + " " * 5000],
)
def test_formula_accepts_only_arithmetic(text: str) -> None:
    with pytest.raises(InvalidGrader):
        multi(text, "same")


def test_formula_supports_powers_and_functions() -> None:
    rewards = {"a": 3.0, "b": 0.25}
    assert multi("a ^ 2 + sqrt(b) - min(a, b, 9) * floor(2.7) / ceil(0.1)").value(rewards) == 9.0
    assert multi("abs(-a) + exp(0) + log(1) + max(a, b)").value(rewards) == 7.0


@pytest.mark.parametrize(
    "text",
    # Python integers are unbounded: the last formula would take minutes for 50 million digits.
    ["a / b", "sqrt(1, 2)", "min + 1", "max((0 - a) ^ 0.5, 1)", "9 ^ 9 ^ 9 ^ 9", "floor(1e300) ^ max(ceil(165432), 1)"],
)
def test_formula_without_finite_value_raises(text: str) -> None:
    with pytest.raises(GradingFailed, match="has no value") as failure:
        multi(text).value({"a": 1.0, "b": 0.0})
    assert failure.value.errors == GradingErrors(formula_parse_error=True)


@given(text=st.text("ab0123456789.+-*/^(), minaxe", max_size=40), a=st.floats(-10, 10), b=st.floats(-10, 10))
def test_formula_of_any_text_is_rejected_or_finite(text: str, a: float, b: float) -> None:
    try:
        assert math.isfinite(multi(text).value({"a": a, "b": b}))
    except (InvalidGrader, GradingFailed):
        pass


def test_template_escapes_literal_braces_like_jinja() -> None:
    given = {
        **CHECK,
        "operation": "eq",
        "input": """{{ '{{' }}x}} {{"{{"}} {{ item.answer }}""",
        "reference": "{{x}} {% {# 4",
    }
    with pytest.raises(InvalidGrader, match="neither"):
        parse(given)
    assert graded({**given, "reference": "{{ '{{' }}x}} {{ '{{' }} 4"}, "", {"answer": "4"}).reward == 1.0


@pytest.mark.parametrize(
    ("low", "high", "inside", "outside"),
    [
        (0, 1, "0 1 0.5 1.0", "2 -0.5 1.5 10"),
        (1, 5, "1 4.75 5.0", "0.5 5.5"),
        (0.25, 0.75, "0 0.25 0.7501 1", "-0.1 1.1 2"),
        (-2.5, -0.5, "-0.5 -1 -2.5", "-3.1 0.5 1"),
        (0, 1000, "0 0.5 7 70 1000", "007 00 010.5 -1"),
    ],
)
def test_judge_regex_accepts_only_result_and_reason(low: float, high: float, inside: str, outside: str) -> None:
    judge = SCORE | {"range": [low, high]}
    short = parse(judge | {"sampling_params": {"max_completion_tokens": 16}})
    long = parse({name: value for name, value in judge.items() if name != "sampling_params"})
    assert isinstance(short, ScoreModel) and isinstance(long, ScoreModel)
    for text in (inside + " " + outside).split():
        fits = text in inside.split()
        assert bool(re.fullmatch(short.answers_by["regex"], f'{{"result": {text}}}')) is fits, text
        form, reasoned = long.answers_by["regex"], f'{{"reason": "as it is", "result": {text}}}'
        assert bool(re.fullmatch(form, reasoned)) is fits, text
        assert not re.fullmatch(form, reasoned.replace(", ", ",\n")) and not re.fullmatch(form, " " + reasoned)
        assert not re.fullmatch(form, reasoned.replace("as it is", "x" * 161))


def test_score_model_request_has_regex_and_score_is_clamped() -> None:
    (name, body), *_ = requests(parse(SCORE), Sample("4"), {"question": "2+2?"}).items()
    assert name == "judge" and body["messages"][1] == {"role": "user", "content": "2+2?\n4"}
    assert (body["max_completion_tokens"], body["temperature"], body["seed"]) == (99, 0, 4)
    form = body["structured_outputs"]["regex"]
    assert re.fullmatch(form, '{"result": 7.25}') and not re.fullmatch(form, '{"result": 12}')
    answer = ModelAnswer('{"reason": "right", "result": 12}', "starter", 20, 10)
    found = graded(SCORE, "4", {"question": "2+2?"}, {"judge": answer})
    assert (found.reward, found.passed, found.tokens_by_model) == (10.0, True, {"starter": 30})


@pytest.mark.parametrize(
    ("answer", "flag"),
    [
        (ModelAnswer("ten"), "model_grader_parse_error"),
        (ModelAnswer('{"result": NaN}'), "model_grader_parse_error"),
        (ModelAnswer(error="no engine"), "model_grader_server_error"),
        (ModelAnswer(refused=True), "model_grader_refusal_error"),
        (None, "model_grader_server_error"),
    ],
)
def test_score_model_without_valid_answer_sets_error_flag(answer: ModelAnswer | None, flag: str) -> None:
    found = graded(SCORE, "4", {"question": "2+2?"}, {"judge": answer} if answer else {})
    assert found.reward == 0 and not found.passed
    assert getattr(found.errors, flag) and found.messages


@pytest.mark.parametrize(("label", "reward"), [("good", 1), ("bad", 0), ("odd", None)])
def test_label_model_accepts_only_its_labels(label: str, reward: float | None) -> None:
    found = graded(LABEL, "x", answers={"kind": ModelAnswer(f'{{"label": "{label}"}}')})
    assert found.errors.model_grader_parse_error == (reward is None) and found.reward == (reward or 0)


def test_pass_threshold_decides_passing() -> None:
    texts = {"input": "a b", "reference": "a c"}
    similar = {"type": "text_similarity", "name": "x", "evaluation_metric": "rouge_1", **texts}
    assert graded(similar, "").reward == 0.5 and graded(similar, "").passed
    assert not graded({**similar, "pass_threshold": 0.6}, "").passed


def test_pass_threshold_outside_reward_range_is_rejected() -> None:
    code = {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return 5"}
    for taken in ({**EQUAL, "pass_threshold": 1}, {**SCORE, "pass_threshold": 10}, {**code, "pass_threshold": 5}):
        parse(taken)


def test_as_given_of_model_grader_has_sdk_roles():
    assert parse({**LABEL, "input": [{"role": "role", "content": "x"}]}).as_given()["input"][0]["role"] == "user"


# -- similarity --------------------------------------------------------------------------------------------------------


def test_rouge_matches_rouge_score_example() -> None:
    """F-measures of ROUGE-1 and ROUGE-L from https://pypi.org/project/rouge-score."""
    reference, text = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    assert similarity("rouge_1", text, reference)[0] == pytest.approx(0.7058823529411765)
    assert similarity("rouge_l", text, reference)[0] == pytest.approx(0.588, abs=0.13)


@pytest.mark.parametrize("metric", METRICS)
def test_similarity_of_equal_other_and_empty_text(metric: str) -> None:
    sentence = "the quick brown fox jumps over the lazy dog"
    assert similarity(metric, sentence, sentence)[0] == pytest.approx(1, abs=0.01)
    assert similarity(metric, "entirely unlike", sentence)[0] < 0.5
    assert similarity(metric, "", sentence)[0] == 0 and similarity(metric, "", "")[0] == 1


@pytest.mark.parametrize("metric", ["bleu", "gleu", "meteor", "rouge_2", "rouge_l"])
def test_similarity_of_scripts_without_spaces_is_per_character(metric: str) -> None:
    assert 0.3 < similarity(metric, "今天天气很好我们去公园", "今天天气不好我们去公园")[0] < 1


def test_similarity_of_long_text_reports_truncation() -> None:
    reward, cut = similarity("meteor", "a " * (METRICS["meteor"] + 1), "a")
    assert cut and reward > 0
    assert not similarity("rouge_1", "a " * METRICS["meteor"], "a")[1]
