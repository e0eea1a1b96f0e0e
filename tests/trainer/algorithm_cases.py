"""Every algorithm there is, and a step of groups as ragged as any, for the tests beside this file."""

from dataclasses import replace

import numpy as np
from trainer_cases import CPU, VOCAB

from tidemill.algorithms.advantages import ADVANTAGES
from tidemill.algorithms.algorithm_settings import AlgorithmSettings
from tidemill.algorithms.corrections import CORRECTIONS, WITHOUT_OLD
from tidemill.algorithms.preferences import PREFERENCES, WITH_REFERENCE
from tidemill.algorithms.presets import ANCHORED, ATTEMPTS, LOSS_CONSTANTS, PRESETS
from tidemill.algorithms.reductions import REDUCTIONS
from tidemill.core.types import GREEDY, Finish, Group, InfraError, Sample, Score, Support, Task, Trajectory, Version
from tidemill.trainer import training_pass

STEP, LONGEST = 6, 12
RECOMPUTE = {"old_logprobs": "recompute"}
TEACHER = {"model": "teacher", "distil": 1.0}
LEFT_OPEN = {"opd": {"reference": TEACHER}}  # what a preset leaves to the user
LOOSE = {"mis_geometric": {"name": "mis_geometric", "low": 0.8, "high": 1.25}}  # by default it would leave none of these
OF_THREE = {name: {"k": 2} for name in ("pass_at_k", "pkpo")}  # the best of all that there are is the same for all


def settings(name="grpo", **given):
    return AlgorithmSettings.preset(name, **({} if PRESETS[name].get("given") else {"overlong": "mask"}), **given)


def presets():
    return {name: settings(name, **LEFT_OPEN.get(name, {}), **OF_THREE.get(name, {})) for name in PRESETS}


def functions():
    """Every policy loss under every reduction; every correction, advantage, preference and further term."""
    found = {
        f"{loss}, {reduction}": settings(loss=loss, reduction=reduction, **(RECOMPUTE if loss in ANCHORED else {}))
        for loss in LOSS_CONSTANTS
        for reduction in REDUCTIONS
    }
    found |= {
        name: settings(corrections=[LOOSE.get(name, name)], **(RECOMPUTE if name not in WITHOUT_OLD else {}))
        for name in CORRECTIONS
    }
    for name in ADVANTAGES:
        given = {"none": {"reference": TEACHER}, "gae": {"critic": "initial"}, **OF_THREE}.get(name, {})
        found[f"advantage {name}"] = settings(advantage=name, **given)
    for name in PREFERENCES:
        given = {"reference": "initial"} if name in WITH_REFERENCE else {}
        found[name] = settings(preference=name, loss="reinforce", reduction="attempt", **RECOMPUTE, **given)
    for kl in ("k1", "k2", "k3"):
        found[f"{kl} and entropy"] = settings(reference={"kl": 0.3, "estimator": kl}, entropy=0.1)
    found["kl in the reward"] = settings(reference={"kl": 0.3, "into": "reward"})
    found["four updates"] = settings(updates={"minibatches": 2, "epochs": 2}, **RECOMPUTE)
    return found


def played(model, seed=1, seats=1):
    """Groups of several prompts, two of which begin alike: seats with a row each, tool tokens, turns with rewards, attempts
    that are cut off, without a score or all equal, a twin, two temperatures, a truncated distribution; old tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, n) for n in (9, 4, 1, 6)]
    prompts[3][:4] = prompts[1]
    groups = []
    for g, prompt in enumerate(prompts):
        seated = 2 if g == 0 else seats
        rows = [_row_of(rng, model, prompt, g, sample, seat) for sample in (0, 1, 2, GREEDY) for seat in range(seated)]
        groups.append(Group(g + 3, Task(str(g), "p"), rows))
    groups[1].ends[2].finish = Finish.LENGTH
    groups[1].trajectories.append(_row_of(rng, model, prompts[1], 1, 3, 0))
    groups[3].trajectories.append(_twin(groups[3].trajectories[0], sample=3))
    for group in groups:
        for t in group.ends:
            mine = {"form": float(rng.integers(0, 2)), "sense": float(rng.random())}
            seats = tuple(float(rng.integers(0, 3)) for _ in range(t.seat + 1))
            t.outcome = Score(float(rng.integers(0, 3)) / 2, mine, (float(rng.random()),), seats)
    groups[1].ends[4].outcome = InfraError("lost")
    for t in groups[2].ends:
        t.outcome = Score(1.0, {"form": 1.0}, seats=(1.0,) * (t.seat + 1))
    for t in groups[3].ends[:3]:  # one of them is solved
        reward = 1.0 if t.sample == 0 else 0.5 * (t.sample - 1)
        t.outcome = Score(reward, {"form": 0.0, "sense": 0.3 * t.sample}, seats=(0.2 * t.sample, 0.5)[: t.seat + 1])
    groups[3].ends[4].outcome = Score(0.25, {"form": 0.0, "sense": 0.5}, seats=(0.25,))
    return groups


def forked(groups):
    """The same attempts with a row for each turn: the turns before it are context, as where a history was branched."""
    return [Group(g.id, g.task, [part for rows in g.attempts for part in _turn_by_turn(rows, rows[-1])]) for g in groups]


def _turn_by_turn(rows, end):
    found = []
    for t in rows:
        edges = np.flatnonzero(np.diff(t.learnt, prepend=False, append=False)).reshape(-1, 2)
        before, counted = 0, 0
        for turn, (begin, stop) in enumerate(edges.tolist()):
            cut = len(t.tokens) if turn == len(edges) - 1 else stop
            own = (np.arange(cut) >= begin) & (np.arange(cut) < stop)
            mask = t.mask[:cut] & own
            found.append(
                replace(
                    t,
                    tokens=t.tokens[:cut].copy(),
                    mask=mask,
                    logprobs=np.where(mask, t.logprobs[:cut], np.float32(0)),
                    versions=np.where(mask, t.versions[:cut], np.int32(-1)),
                    sources=tuple(v for v in t.sources if v.step in set(t.versions[:cut][mask].tolist())),
                    finish=t.finish if t is end and cut == len(t.tokens) else Finish.STOP,
                    outcome=None,
                    support=t.support and _rows_of(t.support, counted, counted + stop - begin),
                    parent=(len(found) - 1, before) if turn else None,
                    given=None if t.given is None else t.given[:cut] & own,
                )
            )
            before, counted = stop, counted + stop - begin
    found[-1].outcome = end.outcome
    return found


def _rows_of(support, first, last):
    """Of the sampled tokens first .. last - 1."""
    begin, end = support.offsets[first], support.offsets[last]
    return Support(support.ids[begin:end], support.offsets[first : last + 1] - begin)


def as_given(groups, kind):
    """The same replies as if the tasks held them: nobody sampled a token."""
    for group in groups:
        scored = [rows for rows in group.attempts if isinstance(rows[-1].outcome, Score) and rows[-1].sample != GREEDY]
        numbered = [(number, t) for number, rows in enumerate(scored[: ATTEMPTS[kind]]) for t in rows]
        group.trajectories = [t for _, t in numbered]
        for number, t in numbered:
            t.given, t.mask = t.mask, np.zeros_like(t.mask)
            t.logprobs, t.versions = np.zeros_like(t.logprobs), np.full_like(t.versions, -1)
            t.sources, t.support, t.sample, t.finish = (), None, number, Finish.GIVEN
            t.outcome = t.outcome and Score(float(group.id % 2 if kind == "labels" else number == 0))
    return groups


def _row_of(rng, model, prompt, g, sample, seat):
    sampled, tool = int(rng.integers(2, 9)), int(rng.integers(0, 3))
    tokens = np.concatenate([prompt, rng.integers(0, VOCAB, sampled + tool)]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    mask[len(prompt) + sampled // 2 :][:tool] = False
    row = _row(tokens, mask, 0.7 if g == 1 else 1.0, _support(rng, tokens[mask]) if g == 3 else None)
    versions = np.where(mask, rng.integers(STEP - 4, STEP + 1, len(tokens)), -1).astype(np.int32)
    return Trajectory(
        tokens,
        mask,
        logprobs=_beside(rng, model, row, 0.4),
        versions=versions,
        finish=Finish.STOP,
        sources=tuple(Version(int(v)) for v in np.unique(versions[mask])),
        sample=sample,
        seat=seat,
        temperature=row.temperature,
        support=row.support,
    )


def _twin(of, sample):
    """The same tokens once more, with another score."""
    return Trajectory(
        *(of.tokens.copy(), of.mask.copy(), of.logprobs.copy(), of.versions.copy()),
        finish=of.finish,
        sources=of.sources,
        sample=sample,
        support=of.support,
    )


def _row(tokens, mask, temperature, support):
    nothing = np.zeros(len(tokens), np.float32)
    unknown = np.full(len(tokens), -1, np.int32)
    return Sample(tokens, mask, nothing, unknown, nothing, nothing, temperature=temperature, support=support)


def _support(rng, sampled):
    ids = [np.unique([token, *rng.integers(0, VOCAB, 6)]) for token in sampled]
    return Support(np.concatenate(ids).astype(np.int32), np.cumsum([0, *map(len, ids)]).astype(np.int32))


def _beside(rng, model, row, far):
    """Logprobs of another policy than the model's, not very far from them."""
    (own,) = training_pass.forward(model, [row], training_pass.Compute(CPU, 100))
    return np.where(row.mask, np.minimum(own + far * rng.normal(size=len(own)), -1e-3), 0).astype(np.float32)


def logprobs_of(groups, model, seed=1):
    """Of p_hat and of a reference, and a critic's values, by the row's tokens."""
    rng, found = np.random.default_rng(seed), {}
    for t in (t for group in groups for t in group.trajectories):
        row = _row(t.tokens, t.learnt, t.temperature, t.support)
        found[id(t.tokens)] = {who: _beside(rng, model, row, far) for who, far in (("policy", 0.2), ("reference", 0.5))}
        found[id(t.tokens)]["critic"] = np.where(t.mask, rng.normal(size=len(t.mask)), 0).astype(np.float32)
    return found


def prepared(algorithm, groups, known):
    rows = algorithm.rows(groups, STEP)

    def of(row, who):
        if id(row.tokens) in known:
            return known[id(row.tokens)][who]
        return -0.1 * np.arange(len(row.tokens), dtype=np.float32) * (1 + len(who) / 10)  # of a mismatched row

    return algorithm.prepare(groups, STEP, rows, {who: [of(row, who) for row in rows] for who in algorithm.asks})
