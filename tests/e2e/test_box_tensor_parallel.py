"""A job whose devices share one copy of the model (tensor parallelism): created, moved and served by a whole box."""

import pytest

from tests.e2e.box_support import wait_for, whole_box
from tests.train_support.tiny import make_model_dir, write_chat_file

# Relative, after over a hundred steps that nearly memorise the data; 1.4e-5 seen. A lost step costs hundredths.
CURVE_TOLERANCE = 1e-4

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 4\n") as one:
        yield one


def test_shared_model_is_trained_moved_and_served(box, tmp_path):
    base = make_model_dir(tmp_path / "tiny", hidden_size=128, intermediate_size=256, head_dim=32)
    box.run("model", "import", str(base), "--name", "tiny")
    data = box.upload(write_chat_file(tmp_path / "train.jsonl", 200).read_bytes())
    same = ["--model", "tiny", "--batch-size", "4", "--max-length", "96", "--set", "precision=fp32"]
    planned = box.ask("plan", "job", *same, "--tensor-parallel", "2", "--devices", "4")
    assert planned["fits"] and planned["sizes"] == [2, 4]

    same += ["--file", data, "--epochs", "6", "--seed", "3", "--max-devices", "4"]
    whole = box.ask("job", "submit", *same)["id"]
    box.run("mode", "set", "train", "--wait")
    box.run("job", "wait", whole, "--timeout", "300")
    job = box.ask("job", "submit", *same, "--tensor-parallel", "2")["id"]
    wait_for(lambda: len(box.losses(job)) >= 3, "three steps")
    box.run("mode", "set", "split", "--train", "3", "--wait")  # two of the three: 3 is not a multiple of 2
    done = len(box.losses(job))
    wait_for(lambda: len(box.losses(job)) > done, "a step on two devices")
    box.run("mode", "set", "train", "--wait")
    box.run("job", "wait", job, "--timeout", "300")

    rows = [row for row in box.steps(job) if row["loss"]]
    assert {row["devices"] for row in rows} == {2, 4}
    losses, expected = box.losses(job), box.losses(whole)
    assert losses.keys() == expected.keys()
    worst = max(abs(losses[step] - loss) / loss for step, loss in expected.items())
    print(f"worst difference of a step's loss over {len(losses)} steps: {worst:.1e}")
    assert worst <= CURVE_TOLERANCE
    answers = []
    for made in (whole, job):
        model = box.client().fine_tuning.jobs.retrieve(made).fine_tuned_model
        asked = [{"role": "user", "content": "how many are 20 and 22"}]
        said = box.client(max_retries=5).chat.completions.create(
            model=model, messages=asked, max_tokens=8, temperature=0
        )
        answers.append(said.choices[0].message.content)
    assert answers[0] == answers[1] != ""
