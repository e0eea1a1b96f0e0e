"""Opens a Hugging Face model folder, or makes a random model on demand."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from tidemill.algorithms.algorithm_settings import begins_as
from tidemill.core.errors import ConfigError
from tidemill.envs.environment_settings import RowsSettings, environments_of
from tidemill.models.architecture import Architecture
from tidemill.models.new_model import SIZES, ModelSize, architecture, fresh_model
from tidemill.models.tokenizer import EOS, PAD, UNK, Tokenizer, generation_config, load_tokenizer, stop_ids
from tidemill.run.recipe import RunConfig

ALPHABET = string.ascii_lowercase + string.digits + string.punctuation + " \n"
NEW, MADE = "new:", "new-"  # prefix of a model that is to be made, and of its folder
NEW_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder with its architecture, tokenizer and stop ids."""

    path: Path
    architecture: Architecture
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    @classmethod
    def open(cls, path: Path, of_class: str | None = None) -> ModelFolder:
        """Open a model's folder. of_class: see `load_tokenizer`. Raises ValueError."""
        expect_folder(path)
        architecture = Architecture.from_folder(path)
        tokenizer = load_tokenizer(path, of_class)
        return cls(path, architecture, tokenizer, stop_ids(tokenizer, architecture, generation_config(path)))


def expect_folder(path: Path) -> None:
    """Raise ConfigError if there is no folder at `path`."""
    if not path.is_dir():
        raise ConfigError(
            f"model {str(path)!r} is not a folder: give the path of a Hugging Face model, its name on the hub, or 'new:2m'"
        )


def expect_model(model: str) -> None:
    """Raise the errors that `ModelFolder.open` would raise before it reads the tokenizer."""
    if architecture_of(model) is None:
        expect_folder(Path(model).expanduser())


def expect_readable(config: RunConfig) -> None:
    """Raise ValueError if a run could not read its models' folders.

    Weights' names and shapes, tokenizers and the chat template are checked. No weight is read, but torch is imported.
    """
    from tidemill.models.hf_weights import check_folder

    if not config.model.startswith(NEW) and (path := Path(config.model).expanduser()).is_dir():
        _expect_template(ModelFolder.open(path))
        check_folder(path)
    for each, scored in ((config.reference, False), (config.critic, True)):
        given = begins_as(each, None, str)
        if given is not None and not given.startswith(NEW):
            check_folder(Path(given).expanduser(), scored=scored)
    for env in environments_of(config.env):
        if isinstance(env, RowsSettings) and env.reward == "model" and isinstance(env.reward_options.get("folder"), str):
            path = Path(env.reward_options["folder"]).expanduser()
            check_folder(path, scored=True)
            load_tokenizer(path)


def _expect_template(folder: ModelFolder) -> None:
    if not folder.tokenizer.chat_template:
        return
    try:
        folder.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"{folder.path}: its chat template fails on a single user message ({type(error).__name__}: {error})"
        ) from None


def named_folder(model: str, beside: Path, seed: int) -> Path:
    """The folder that `model` names; for `new:SIZE` a folder in `beside`."""
    if not model.startswith(NEW):
        return Path(model).expanduser()
    _new_size(model)
    return beside / f"{MADE}{model.removeprefix(NEW)}-{seed}"


def resolve_model(model: str, beside: Path, seed: int) -> Path:
    """The folder that `model` names, with a new model made if need be."""
    folder = named_folder(model, beside, seed)
    if model.startswith(NEW) and not folder.is_dir():
        fresh_model(folder, alphabet=ALPHABET, lowercase=True, context=NEW_CONTEXT, seed=seed, **_new_size(model))
    return folder


def architecture_of(model: str) -> Architecture | None:
    """The architecture that `model` names, or None if its folder is missing. No weight is read."""
    if not model.startswith(NEW):
        folder = Path(model).expanduser()
        return Architecture.from_folder(folder) if folder.is_dir() else None
    return architecture(_new_size(model), vocab=len(vocabulary_of(model)), context=NEW_CONTEXT, ends={})


def vocabulary_of(model: str) -> dict[int, str]:
    """The tokens of the model's vocabulary by id. Raises ValueError if there is no tokenizer."""
    if model.startswith(NEW):
        return dict(enumerate((PAD, EOS, UNK, *ALPHABET)))
    return {i: token for token, i in load_tokenizer(Path(model).expanduser()).get_vocab().items()}


def check_companions(config: RunConfig) -> None:
    """Raise ConfigError if a reference, critic or frozen model is missing or reads other tokens."""
    for key, each in (("algorithm.reference.model", config.reference), ("algorithm.critic.model", config.critic)):
        if (given := begins_as(each, None, str)) is not None:
            _check_companion(key, given, config.model)
    for name, given in config.frozen_policies.items():
        if name in config.whole_policies:
            _check_companion(f"policies.{name}.frozen", given, config.model)


def _check_companion(key: str, given: str, model: str) -> None:
    """Compare one companion's tokens with the policy's, if the policy's folder is here."""
    what = f"{key} = {given!r}"
    other = None if given.startswith(NEW) else architecture_of(given)
    if other is None:
        raise ConfigError(f"{what} is not a folder: give the path of a Hugging Face model, or 'initial'")
    if (own := architecture_of(model)) is None:
        return
    advice = "it cannot read the policy's tokens; give a model with the policy's tokenizer"
    if other.vocab != own.vocab:
        raise ConfigError(
            f"{what} has a vocabulary of {other.vocab} tokens and the policy {model!r} one of {own.vocab}: {advice}"
        )
    theirs, ours = vocabulary_of(given), vocabulary_of(model)
    if differ := sorted(i for i in theirs.keys() | ours.keys() if theirs.get(i) != ours.get(i)):
        first = f"id {differ[0]} is {theirs.get(differ[0])!r} there and {ours.get(differ[0])!r} here"
        raise ConfigError(f"{what} and the policy {model!r} differ in {len(differ)} of their tokens ({first}): {advice}")


def _new_size(model: str) -> ModelSize:
    size = model.removeprefix(NEW)
    if size not in SIZES:
        raise ConfigError(f"model {model!r}: expected {', '.join(NEW + name for name in SIZES)} or a folder")
    return SIZES[size]
