"""The line that says where a step's time went."""

from __future__ import annotations

from tidemill.observability.spent import processes, where_time_went


def told(**shares: dict[str, float]) -> dict[str, float]:
    return {
        f"time/{name.replace('_', '-')}/{kind}": share for name, kinds in shares.items() for kind, share in kinds.items()
    }


CONTROLLER = {"rollouts": 0.2, "train": 0.7, "ledger": 0.04, "publication": 0.03, "check": 0.02, "other": 0.01}
TRAINER = {"train": 0.7, "sync": 0.009, "wait for engines": 0.05, "wait for rollouts": 0.2, "wait for ledger": 0.041}
ENGINE = {"generate": 0.8, "wait for trainer": 0.15, "other": 0.05}


def test_the_trainer_comes_first_and_every_process_says_for_whom_it_waited():
    metrics = told(controller=CONTROLLER, engine_0=ENGINE, trainer=TRAINER) | {"time/reward": 0.06, "time/step_s": 2.0}
    assert where_time_went(metrics | {"time/train": 0.5, "loss": 1.0}) == (
        "trainer: train 70 awaits rollouts 20 engines 5 ledger 4 | engine: generate 80 awaits trainer 15 other 5 | "
        "controller: ledger 4 awaits trainer 70 rollouts 20 engines 5 other 1 | reward: judging 6"
    )


def test_engines_are_pooled_and_those_of_the_reference_apart():
    other = {"generate": 0.4, "wait for trainer": 0.6}
    metrics = told(reference_0={"score": 0.3, "wait for trainer": 0.7}, engine_0=ENGINE, engine_11=other)
    assert where_time_went(metrics) == (
        "engines: generate 60 awaits trainer 38 other 2 | reference: score 30 awaits trainer 70"
    )


def test_what_is_not_known_is_a_dash():
    assert where_time_went({}) == where_time_went({"time/train": 0.3, "time/step_s": 1.0}) == "–"


def test_shares_are_read_from_a_steps_metrics():
    assert processes(told(trainer=TRAINER) | {"time/step_s": 1.0, "train/loss": 0.0}) == {"trainer": TRAINER}
