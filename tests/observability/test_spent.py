"""Where time went, as a column and as lines."""

from __future__ import annotations

from tidemill.observability.time_breakdown import column, lines, processes


def told(**shares: dict[str, float]) -> dict[str, float]:
    return {
        f"time/{name.replace('_', '-')}/{kind}": share for name, kinds in shares.items() for kind, share in kinds.items()
    }


CONTROLLER = {"rollouts": 0.2, "train": 0.7, "ledger": 0.04, "publication": 0.03, "check": 0.02, "other": 0.01}
TRAINER = {"train": 0.7, "sync": 0.009, "wait for engines": 0.05, "wait for rollouts": 0.2, "wait for ledger": 0.041}
ENGINE = {"generate": 0.8, "wait for trainer": 0.15, "other": 0.05}


def test_the_column_has_work_and_longest_wait_of_trainer_and_engines():
    metrics = told(controller=CONTROLLER, engine_0=ENGINE, trainer=TRAINER) | {"time/reward": 0.06, "time/step_s": 2.0}
    assert column(metrics | {"time/train": 0.5, "loss": 1.0}) == "train 70 (rollouts 20)  gen 80 (trainer 15)"
    widest = {
        "trainer": {"train": 0.1, "wait for evaluation": 0.9},
        "engine_0": {"generate": 0.7, "wait for environment": 0.3},
    }
    assert column(told(**widest)) == "train 10 (evaluation 90)  gen 70 (env 30)"
    assert column(told(trainer={"train": 1.0})) == "train 100"  # nothing is sampled, nobody waited for


def test_a_line_for_each_process_with_its_largest_shares():
    found = processes(told(controller=CONTROLLER, engine_0=ENGINE, trainer=TRAINER))
    trainer = ("trainer", "train 70%, awaits rollouts 20%, awaits engines 5%, awaits ledger 4%")
    engine = ("engine", "generate 80%, awaits trainer 15%, unnamed 5%")
    assert lines(found) == [trainer, engine]
    driver = "awaits trainer 70%, awaits rollouts 20%, awaits engines 5%, ledger 4%, unnamed 1%"
    assert lines(found, 9, controller=True) == [trainer, engine, ("controller", driver)]
    assert lines(found, 1) == [("trainer", "train 70%"), ("engine", "generate 80%")]


def test_engines_are_pooled_and_those_of_the_reference_apart():
    other = {"generate": 0.4, "wait for trainer": 0.6}
    metrics = told(reference_0={"score": 0.3, "wait for trainer": 0.7}, engine_0=ENGINE, engine_11=other)
    assert column(metrics) == "gen 60 (trainer 38)"
    assert [name for name, _ in lines(processes(metrics))] == ["engine", "reference"]


def test_what_is_not_known_is_a_dash():
    assert column({}) == column({"time/train": 0.3, "time/step_s": 1.0}) == "–" and lines({}) == []


def test_shares_are_read_from_a_steps_metrics():
    assert processes(told(trainer=TRAINER) | {"time/step_s": 1.0, "train/loss": 0.0}) == {"trainer": TRAINER}
