"""Tasks made of held-out text: files that the lm-evaluation-harness reads as they are, with this library or with any other model.

Three tasks, whose items follow from (seed, fingerprint of the data, split, context) alone:

    local_last_word        the last word of a sentence, given what stands before it (after LAMBADA, Paperno et al., 2016)
    local_sentence_order   which of four orders of three sentences is that of the text, given the sentence before them
    local_needle           a key and its value, hidden in a line among lines of text and asked for at the end; four values to choose from
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from depthroute.common.errors import RequestError
from depthroute.common.files import read_json, waiting_lock, write_json, write_text
from depthroute.data import Split, TextTokenizer, TokenDataset

VERSION = 1
CACHE = "cache"  # what the data sets library makes of the files, kept out of the user's own cache
LOCK = ".lock"
CHOICES = 4
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHARES = (4, 2, 1)  # the lengths of needle prompts: the context divided by each
PASSAGE_TOKENS = 256
FEWEST_WORDS = 5  # of a passage before its last word
WORDS_OF_A_LINE = 24
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z])")
LAST_WORD = re.compile(r"(?<=\S )[A-Za-z]{3,}(?=[.!?](?:\s|$))")
KEY = re.compile(r"\b[a-z]{4,10}\b")

TaskItem = dict[str, Any]
_Made = tuple[list[TaskItem], str | None]  # and why there are none, or not all


class LocalTask(NamedTuple):
    """A task that was written, with the number of its items, or none, and why it, or a part of it, was not: `reason` is a sentence."""

    name: str
    items: int
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class LocalTasks:
    """What the tasks are made of.

    Attributes:
        split: "validation" or "test".
        context: tokens of the longest prompt with its answer, under the data's own tokenizer.
        items: of each task, at most; the needle's are spread over its cells evenly, and so are the first ones of them.
    """

    dataset: TokenDataset
    split: Split = "validation"
    context: int
    items: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("context", 1), ("items", 1), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise RequestError(f"{name} = {getattr(self, name)} is not allowed; it takes {lowest} or more.")

    def write(self, folder: Path, names: Sequence[str] | None = None) -> list[LocalTask]:
        """Write NAME.jsonl and NAME.yaml of tasks that the text and the context have room for, and remove those of tasks they have not.

        The same arguments give the same items. Another process that writes into the folder is waited for.

        Args:
            names: of the tasks. The files of others stay as they are. None: all.

        Raises:
            RequestError: the split has no document.
        """
        tokenizer = self.dataset.tokenizer()
        documents = list(texts(self.dataset, self.split, tokenizer))
        if not documents:
            raise RequestError(f"the {self.split} split of {self.dataset.directory} has no document; choose another one.")
        folder.mkdir(parents=True, exist_ok=True)
        with waiting_lock(folder / LOCK, lambda: None):
            return [self._write(folder, name, documents, tokenizer) for name in (MAKERS if names is None else names)]

    def _write(self, folder: Path, name: str, documents: Sequence[str], tokenizer: TextTokenizer) -> LocalTask:
        random = Random(f"{VERSION}/{name}/{self.seed}/{self.dataset.fingerprint}/{self.split}/{self.context}")
        items, reason = MAKERS[name](_Source(documents, tokenizer, self.context, self.items, random))
        if items:
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
            write_json(folder / f"{name}.yaml", _task(name, folder, self))  # YAML holds JSON
        else:
            for ending in ("yaml", "jsonl"):
                (folder / f"{name}.{ending}").unlink(missing_ok=True)
        return LocalTask(name, len(items), reason)


def follow_move(folder: Path) -> None:
    """Where a folder of tasks was moved, let their YAML files name the data beside them: the harness takes absolute paths only."""
    for name in MAKERS:
        path = folder / f"{name}.yaml"
        if path.exists():
            task = read_json(path)
            (split,) = task["dataset_kwargs"]["data_files"]
            here = _data(name, folder, split)
            if task["dataset_kwargs"] != here:
                with waiting_lock(folder / LOCK, lambda: None):
                    write_json(path, task | {"dataset_kwargs": here})


def texts(dataset: TokenDataset, split: Split, tokenizer: TextTokenizer) -> Iterator[str]:
    """The texts of a split's documents, in order."""
    tokens, edges = dataset.tokens(split), dataset.boundaries(split)
    for start, end in pairwise(edges.tolist()):
        yield tokenizer.decode(tokens[start : end - 1].tolist())


class _Source(NamedTuple):
    """What the items of one task are drawn from."""

    documents: Sequence[str]
    tokenizer: TextTokenizer
    context: int
    items: int
    random: Random

    def length(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def in_turn(self, candidates: Callable[[str], list[Any]]) -> Iterator[tuple[int, Any]]:
        """(document, candidate) one of each document, in a drawn order, then a second one of each that has one, and so on."""
        drawn = []
        for number, text in enumerate(self.documents):
            found = candidates(text)
            self.random.shuffle(found)
            drawn.append((number, found))
        self.random.shuffle(drawn)
        for turn in range(max(len(found) for _, found in drawn)):
            yield from ((number, found[turn]) for number, found in drawn if turn < len(found))


def _last_word(source: _Source) -> _Made:
    """Passages that end with a word and a full stop, and begin with a whole word."""
    items: list[TaskItem] = []
    for document, match in source.in_turn(lambda text: list(LAST_WORD.finditer(text))):
        target = f" {match.group()}"
        room = min(source.context, PASSAGE_TOKENS) - source.length(target)
        before = _last_words(source, source.documents[document][: match.start() - 1], room)
        if len(before.split()) >= FEWEST_WORDS:
            items.append({"context": before, "target": target, "document": document})
        if len(items) == source.items:
            break
    return items, None if items else "no sentence of the text ends with a word and fits into the context."


def _last_words(source: _Source, text: str, room: int) -> str:
    """The end of `text`, from the start of a word on, that takes `room` tokens at most."""
    starts = [match.start() for match in re.finditer(r"\S+", text)][-room:] if room > 0 else []
    while starts and source.length(text[starts[0]:]) > room:
        over = source.length(text[starts[0]:]) - room
        starts = starts[1 + over // 16:]  # a word rarely has more than 16 tokens, so this ends soon and drops hardly a word too many
    return text[starts[0]:] if starts else ""


def _sentence_order(source: _Source) -> _Made:
    """One sentence, and the three behind it in four orders, the text's own among them."""
    items: list[TaskItem] = []
    for document, (first, *others) in source.in_turn(_runs_of_four):
        orders = [" ".join(order) for order in permutations(others)]
        if 1 + source.length(f"{first} {orders[0]}") > source.context:  # one to spare: another order may take a token more
            continue
        shown = [orders[0], *source.random.sample(orders[1:], CHOICES - 1)]
        source.random.shuffle(shown)
        if any(source.length(f"{first} {order}") > source.context for order in shown):
            continue
        items.append({"context": first, "choices": shown, "answer": shown.index(orders[0]), "document": document})
        if len(items) == source.items:
            break
    return items, None if items else "no paragraph of the text has four sentences that fit into the context together."


def _runs_of_four(text: str) -> list[list[str]]:
    """Four sentences of a paragraph in a row, the last three different; runs do not overlap."""
    runs = []
    for paragraph in re.split(r"\n\s*\n", text):
        sentences = SENTENCE_END.split(" ".join(paragraph.split()))
        whole = [sentence if sentence.endswith((".", "!", "?")) and len(sentence.split()) > 2 else "" for sentence in sentences]
        start = 0
        while start + 4 <= len(whole):
            run = whole[start : start + 4]
            if all(run) and len(set(run[1:])) == 3:
                runs.append(run)
                start += 4
            else:
                start += 1
    return runs


def _needle(source: _Source) -> _Made:
    """Prompts of the lengths of `SHARES`, the needle at the depths of `DEPTHS`: 0 is the first line, 1 the last before the question."""
    spelt = _line("abcd", "01234 56789")
    if source.tokenizer.decode(source.tokenizer.encode(spelt)) != spelt:
        return [], "the tokenizer of this corpus cannot spell its line."
    keys = sorted({key for text in source.documents for key in KEY.findall(text)})
    lines = [line for text in source.documents for line in _lines(text)]
    lengths = list(dict.fromkeys(source.context // share for share in SHARES))
    cells = [(length, depth) for length in lengths for depth in DEPTHS]
    source.random.shuffle(cells)
    each = max(1, source.items // len(cells))
    made = [(length, _needle_item(source, keys, lines, length, depth)) for _ in range(each) for length, depth in cells if keys and lines]
    # One of each cell and then the next of each: however few are asked for, or asked, they are spread over the cells.
    items = [item for _, item in made if item is not None][: source.items]
    without = [str(length) for length in lengths if not any(item for of, item in made if of == length)]
    if not items:
        return [], "the context has no room for the needle, a line of text and the question."
    reason = f"prompts of {' and '.join(without)} tokens have no room for the needle, a line of text and the question."
    return items, reason if without else None


def _needle_item(source: _Source, keys: Sequence[str], lines: Sequence[str], length: int, depth: float) -> TaskItem | None:
    random = source.random
    key = random.choice(keys)
    values = [str(number) for number in random.sample(range(10_000, 100_000), CHOICES)]
    answer = random.randrange(CHOICES)
    needle, question = _line(key, values[answer]), f"The code of {key} is"
    longest = max((f"{question} {value}" for value in values), key=source.length)
    room = length - source.length(f"{needle}\n") - source.length(longest)
    start, shown = random.randrange(len(lines)), list[str]()
    while (room := room - source.length(f"{lines[(start + len(shown)) % len(lines)]}\n")) >= 0:
        shown.append(lines[(start + len(shown)) % len(lines)])
    while shown:
        place = round(depth * len(shown))
        context = "\n".join([*shown[:place], needle, *shown[place:], question])
        if max(source.length(f"{context} {value}") for value in values) <= length:
            break
        shown.pop()  # tokens across a line's end can differ from those of the lines
    if not shown or any(value in "\n".join(shown) for value in values) or any(question in line for line in shown):
        return None
    return {"context": context, "choices": values, "answer": answer, "cell": f"length {length}, depth {depth:g}"}


def _line(key: str, value: str) -> str:
    return f"The code of {key} is {value}."


def _lines(text: str) -> list[str]:
    """The text's lines, at the ends of sentences and after `WORDS_OF_A_LINE` words broken."""
    lines = []
    for sentence in (part for line in text.splitlines() for part in SENTENCE_END.split(line.strip())):
        words = sentence.split(" ")
        lines += [" ".join(words[start : start + WORDS_OF_A_LINE]) for start in range(0, len(words), WORDS_OF_A_LINE)]
    return [line for line in lines if line.strip()]


MAKERS: dict[str, Callable[[_Source], _Made]] = {
    "local_last_word": _last_word,
    "local_sentence_order": _sentence_order,
    "local_needle": _needle,
}
MEASURED = {
    # All orders of one item have the same number of characters, so accuracy by log-probability per character would be the same again.
    "local_last_word": ("acc", "perplexity"),
    "local_sentence_order": ("acc",),
    "local_needle": ("acc", "exact_match"),
}

_AGGREGATED = {"perplexity": "perplexity"}  # exp(-mean) of the log-probabilities of answers


def _task(name: str, folder: Path, made: LocalTasks) -> dict[str, Any]:
    """The harness's description of a task. `context`, `target`, `choices` and `answer` are names of the items' fields."""
    of_words = name == "local_last_word"
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": _data(name, folder, made.split),
        "test_split": made.split,
        "output_type": "loglikelihood" if of_words else "multiple_choice",
        "doc_to_text": "context",
        "doc_to_target": "target" if of_words else "answer",
        **({} if of_words else {"doc_to_choice": "choices"}),
        "num_fewshot": 0,
        "metric_list": [
            {"metric": metric, "aggregation": _AGGREGATED.get(metric, "mean"), "higher_is_better": metric not in _AGGREGATED}
            for metric in MEASURED[name]
        ],
        "metadata": {
            "version": VERSION, "data": made.dataset.fingerprint, "seed": made.seed, "context": made.context, "items": made.items,
        },
    }  # fmt: skip


def _data(name: str, folder: Path, split: str) -> dict[str, Any]:
    return {"data_files": {split: str((folder / f"{name}.jsonl").resolve())}, "cache_dir": str((folder / CACHE).resolve())}
