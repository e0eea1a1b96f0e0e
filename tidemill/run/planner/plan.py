"""Plan of a run: the numbers that follow from recipe, model and machine. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidemill.algorithms.preferences import UNPAIRED
from tidemill.controller.offline_groups import ROWS as HELD_OUT_ROWS
from tidemill.core.errors import ConfigError
from tidemill.core.hardware import usable_cores
from tidemill.models.architecture import Architecture
from tidemill.run.planner.device_plan import DevicePlan, as_configured, resolved
from tidemill.run.recipe import RunConfig
from tidemill.weight_sync.sync_settings import BaseSyncSettings

RAMP_UPDATES = 20  # updates over which a warm-up's learning rate rises


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Numbers that follow from a recipe. `plan_of` computes them."""

    config: RunConfig
    slots: int  # groups that may be admitted and not trained yet: see `controller.admission_buffer`
    samples: int  # attempts in a step's own groups
    replayed: int  # groups of earlier steps that a step trains once more, at most
    step_rows: int  # rows that a step runs forward, at most: its own, the replayed, and mismatched ones if it needs them
    most_rows: int  # rows that the trainer gets at once, at most: of a step, the warm-up, or held-out tasks
    updates: int  # optimizer updates in a step
    eval_every: int  # steps between evaluations
    saves_beside: bool  # checkpoints are written beside training; the last one is not
    coarsest: str  # dtype of lowest precision that a logprob passes through, in trainer or engine
    shares_cores: bool  # processes may compute with fewer threads than they were given; not where sums must keep their bits
    lanes: int  # micro-batches that the trainer may run in parallel on a CPU; 1 on each of several ranks, or to keep bits
    streams: bool  # a step's gradient may be accumulated as its groups finish; not where sums must keep their bits
    takes_turns: bool  # trainer and engines share a device, and each gives its memory back while the other computes
    context: int  # tokens that a sequence may hold, given enough memory; 0: the model is not known
    context_cut: str  # a sentence for the user if the recipe asks for a longer context than the model has
    devices: DevicePlan  # of the processes; their numbers are those in `config`
    warm_up: bool = False  # of the warm-up: supervised, without reference and critic

    @property
    def episodes(self) -> int:
        """Episodes that may be in flight."""
        baseline = any(each.wants_greedy for each in self.config.algorithms.values())
        return self.slots * (self.config.rollout.group_size + baseline)


def _sent_once(sync: BaseSyncSettings) -> str:
    """The key that keeps engines from reading the weights of a version again."""
    key, value = ("transport", repr(sync.kind_name)) if sync.live else ("full_every", sync.every_full)
    return f"placement.sync.{key} = {value}"


def plan_of(config: RunConfig, policy: Architecture | None = None, devices: DevicePlan | None = None) -> RunPlan:
    """The plan of a recipe's run. policy: the model's architecture, if it is known. devices: None: nothing is placed."""
    devices = devices or as_configured(config)
    config = resolved(config, devices)
    rollout, algorithms, placement = config.rollout, config.algorithms.values(), config.placement
    replayed = int(config.data.replay.share * rollout.groups)
    mismatched = any(each.preference in UNPAIRED for each in algorithms)
    step_rows = (rollout.groups + replayed) * rollout.group_size * (2 if mismatched else 1)
    shares = placement.processes and not (config.deterministic or config.engine.fixed_threads)
    dtypes = (config.trainer.dtype, config.trainer.serving_dtype, config.engine.dtype)
    may_turn = placement.share == "auto" and not config.policies  # engines of several keep their weights
    takes_turns = placement.share == "sleep" or (may_turn and devices.shared)
    if takes_turns and not placement.sync.reread:
        raise ConfigError(
            f"{_sent_once(placement.sync)} with trainer and engines that take turns on a device (placement.share): engines "
            "that wake read their weights again, and these are sent once; leave it out, or set placement.share = 'beside'"
        )
    asked, has = config.engine.context or 0, 0 if policy is None else policy.context
    cut = f"engine.context = {asked:,}, but the model has {has:,} positions (max_position_embeddings): {has:,} are used"
    return RunPlan(
        config,
        slots=(config.max_lag + 1) * rollout.groups - rollout.window + 1,
        samples=rollout.groups * rollout.group_size,
        replayed=replayed,
        step_rows=step_rows,
        most_rows=max(
            *(step_rows, config.warmup.batch if config.warmup.accuracy else 0, HELD_OUT_ROWS if config.offline else 0)
        ),
        updates=max(each.updates.count for each in algorithms),
        eval_every=config.eval.every or config.steps,
        saves_beside=0 < config.record.checkpoint_every < config.steps,
        coarsest="bfloat16" if "bfloat16" in dtypes else "float32",
        shares_cores=shares,
        lanes=placement.trainer_threads if shares and config.trainer.ranks == 1 else 1,
        streams=_streams(config, devices) and not takes_turns,
        takes_turns=takes_turns,
        context=0 if policy is None else config.engine.context_of(policy.context),
        context_cut=cut if policy is not None and asked > has else "",
        devices=devices,
    )


def warm_up_plan(config: RunConfig, devices: DevicePlan | None = None) -> RunPlan:
    """The plan of a warm-up: one engine and the trainer take turns on all cores. devices: of the run.

    A deterministic run keeps its numbers of threads, because they decide the bits of sums.
    """
    cores, given, rate = usable_cores(), config.placement, config.warmup.lr
    each = max(1, cores // config.trainer.ranks)
    threads = (given.trainer_threads, given.engine_threads) if config.deterministic else (each, cores)
    together = {"engines": 1, "reference_engines": 0, "trainer_threads": threads[0], "engine_threads": threads[1]}
    constant = {"lr": rate, "warmup_steps": RAMP_UPDATES, "schedule": "constant", "min_lr_ratio": 0.0}
    constant |= {"lora": None}  # it makes the weights that adapters are trained on
    known = type(config.trainer).model_fields
    changed = {
        "policies": {},
        "placement": given.model_copy(update=together),
        "trainer": config.trainer.model_copy(update={key: value for key, value in constant.items() if key in known}),
    }
    if devices is not None:
        devices = replace(devices, engines=devices.engines[:1], reference=())
    plan = plan_of(config.model_copy(update=changed), devices=devices)
    return replace(plan, warm_up=True, saves_beside=config.record.checkpoint_every > 0)


def _streams(config: RunConfig, placed: DevicePlan) -> bool:
    """True when a waiting trainer begins with the groups that have finished."""
    placement, asked = config.placement, config.placement.stream
    if config.deterministic or asked != "auto":
        return not config.deterministic and bool(asked)
    devices = {"cuda:0" if device == "cuda" else device for device in (config.trainer.device, config.engine.device)}
    apart = not placed.shared if placed.placed else len(devices) == 2 and "auto" not in devices
    threads = (
        config.trainer.ranks * placement.trainer_threads + config.engine_pools * placement.engines * placement.engine_threads
    )
    return placement.processes and (threads <= usable_cores() or apart)
