"""The data of a run: those that it names, or others that mean the same by their token ids. Whatever opens a run's data does it here."""

from __future__ import annotations

from pathlib import Path

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json
from depthroute.data import TextTokenizer, TokenDataset, ready_tokenizer, same_tokenizer, usual_begin
from depthroute.train.config import RunConfig
from depthroute.train.run_folder import root_of

TOKENIZER = "tokenizer.json"


def run_data(run: Path, config: RunConfig, data: Path | None = None) -> TokenDataset:
    """The token shards of a run, `config` being its configuration.

    Args:
        run: a run folder, or one of its checkpoint folders.
        data: other shards to read in their place. They must be made with the run's tokenizer, where that is known.

    Raises:
        RequestError: the run names no data; they are not those that it was trained on; or `data` have another tokenizer, or more ids than
            the model.
        FailureError: the shards are cut short or altered.
    """
    dataset = TokenDataset.open(named_data(run, config) if data is None else data)
    if dataset.vocabulary > config.model.vocabulary:
        raise RequestError(
            f"{dataset.directory} has {dataset.vocabulary} tokens and the model of {run} {config.model.vocabulary}; name the data that it "
            "was trained on."
        )
    if data is not None:
        check_tokenizer(run, dataset)
    elif config.data_fingerprint not in ("", dataset.fingerprint):
        raise RequestError(
            f"the data in {config.data} has the fingerprint {dataset.fingerprint}, and {run} names {config.data_fingerprint}: other tokens "
            "lie there now. Give the folder of the run's own data, or other shards made with its tokenizer (--data)."
        )
    return dataset


def run_tokenizer(run: Path, config: RunConfig, data: Path | None = None) -> TextTokenizer:
    """The tokenizer of a run: that of its shards (see `run_data`), or the one of an adopted checkpoint that names no data,
    with what that puts in front of a text.

    Raises:
        RequestError, FailureError: what `run_data` and `ready_tokenizer` raise.
    """
    own = root_of(run) / TOKENIZER
    if data is None and not config.data and own.exists():
        found = ready_tokenizer(own, begin_of_document=usual_begin(own))
        if found.vocabulary > config.model.vocabulary:
            raise RequestError(
                f"{own} has {found.vocabulary} tokens and the model of {run} {config.model.vocabulary}; name token shards (--data)."
            )
        return found
    return run_data(run, config, data).tokenizer()


def named_data(run: Path, config: RunConfig) -> Path:
    """The folder of the data that a run names; RequestError where it names none."""
    if config.data:
        return Path(config.data)
    own = root_of(run) / TOKENIZER
    made = f", made with its own tokenizer: depthroute data prepare TEXT --out SHARDS --tokenizer {own}" if own.exists() else ""
    raise RequestError(f"{run} names no data; give the token shards (--data){made}.")


def check_tokenizer(run: Path, dataset: TokenDataset) -> None:
    """Refuse shards whose ids mean something else to a run: by the tokenizer of its checkpoint, or the hash of the one it was trained with.

    Raises:
        RequestError: the tokenizers differ.
        FailureError: one of them is damaged.
    """
    root = root_of(run)
    own, theirs = root / TOKENIZER, dataset.directory / TOKENIZER
    if own.exists():
        if not same_tokenizer(own, theirs):
            raise RequestError(
                f"the shards in {dataset.directory} were made with another tokenizer than that of {run}: their token ids mean other things "
                f"to this model. Prepare them with {own}."
            )
        return
    path = root / "environment.json"
    manifest = read_json(path).get("data", {}) if path.exists() else {}
    recorded = manifest.get("tokenizer", {}).get("sha256")
    if recorded not in (None, dataset.manifest.tokenizer.sha256):
        raise RequestError(
            f"the shards in {dataset.directory} were made with another tokenizer ({dataset.manifest.tokenizer.sha256[:12]}) than the "
            f"training data of {run} ({recorded[:12]}): their token ids mean other things to this model. Prepare them with the "
            "tokenizer.json of that data."
        )
