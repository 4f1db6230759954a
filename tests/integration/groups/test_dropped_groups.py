"""`rollout drop group`: complete groups that no trainer shall get."""

from __future__ import annotations

from pipeline.contract.train_batch import BatchSpec
from pipeline.trainer.client import TrainerClient


def test_an_operator_drops_a_group_by_its_label(tell, cli):
    story = tell(prompts=3, n=2)
    story.record(*(story.succeeded(attempt) for attempt in story.claim(4)))
    trainer = TrainerClient(story.engine, run=story.run.slug)
    trainer.pull(7, BatchSpec(groups=1))
    labels = [f"{story.run.slug}-g{number:06d}" for number in range(3)]
    would = cli("drop", "group", labels[0], "--dry-run")
    leased = {"group": labels[0], "before": "leased", "consumer": "trainer", "step": 7}
    assert would == leased | {"dry_run": True}
    assert [group["state"] for group in story.groups()] == ["leased", "ready", "open"]
    assert cli("drop", "group", labels[0], "--yes") == leased | {"dry_run": False}
    assert cli("drop", "group", labels[1], "--yes")["before"] == "ready"
    reasons = [(group["state"], group["drop_reason"]) for group in story.groups()]
    assert reasons == [("dropped", "operator"), ("dropped", "operator"), ("open", None)]
    error = cli("drop", "group", labels[2], "--yes", code=7)["error"]
    assert "is open" in error["message"]
    assert cli("drop", "group", "none-g000000", "--yes", code=2)["error"]["code"]
