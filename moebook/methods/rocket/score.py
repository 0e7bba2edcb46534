"""How well each LoRA of a bank models and solves the K shots: perplexity and accuracy (Eq. 1-5).

Perplexities are kept as logarithms, in nats: Eq. 1's own sum overflows single precision past 88.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moebook.data import IGNORED, encode
from moebook.data.encoding import camel
from moebook.data.reading import field
from moebook.data.tasks import KNOWN
from moebook.data.tasks.task import Task, first_line
from moebook.data.templates import Source
from moebook.errors import refuse
from moebook.evaluation import sandbox
from moebook.evaluation.model import InMemory
from moebook.kernels.bank_scoring import Answers, bank_scoring
from moebook.kernels.dispatch import shapes
from moebook.kernels.matmul import product
from moebook.methods.rocket.bank import SETS
from moebook.methods.rocket.config import Count
from moebook.methods.rocket.loras import Lora, attached, check_alike, check_mixable
from moebook.models.anatomy import Anatomy, anatomy
from moebook.models.conventions import keeps_cache
from moebook.nn import evaluating
from moebook.nn.batch import longest
from moebook.runtime import progress
from moebook.settings import checked

__all__ = [
    "accuracy",
    "draw",
    "expand",
    "generate",
    "log_perplexity",
    "scores",
    "write_rationales",
]

Bank = Mapping[str, Lora]
Row = Mapping[str, str]
Item = Mapping[str, Any]
Order = Literal["answer_first", "rationale_first"]
# What says how answers are compared, by the task's name in a row.
JUDGED: dict[str, Task | Source] = {**KNOWN, **SETS}
NONE: Mapping[str, Task] = {}
UNKNOWN = 64  # most new tokens of an answer to a row of no known task
# Settings by which some models change the logits that the head gives.
LOGITS = (
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
)
ORDERS = {
    "answer_first": "the answer first then with its explanation",
    "rationale_first": "the explanation first then with the answer",
}
FIGURE_3 = (
    "Read the question and answer. According to the answer, present your thought about the "
    "solution.\n\n- Please think step by step and provide {order}.\n- Your explanation should not "
    "exceed three sentences.\n\nQuestion: {prompt}\n\nAnswer: {answer}."
)


@checked
def draw(rows: Sequence[Row], shots: int, seed: int) -> list[Row]:
    """Draw the K shots from annotated rows without replacement."""
    if not 1 <= shots <= len(rows):
        refuse("E-KSHOT", f"have {len(rows)} annotated rows, need K = {shots}")
    # A generator of its own: the shots depend on the rows and the seed alone.
    return random.Random(f"rocket/shots/{seed}").sample(list(rows), shots)


@checked
def expand(
    rows: Sequence[Row], *, order: Order = "answer_first"
) -> list[dict[str, str]]:
    """Put each row's own rationale into its answer: Phi (Eq. 3) for data that carry rationales.

    ``answer_first`` gives two lines, answer and rationale; ``rationale_first`` the rationale and
    then, on the last line, "The answer is ..." (the form of Table 8's example).
    """
    expanded = []
    for number, row in enumerate(rows):
        rationale = row.get("rationale", "").strip()
        if not rationale:
            refuse(
                "E-DATA",
                f"row {number} has no rationale; write them first or score without",
            )
        bare = field(row, "answer", f"row {number}")
        # Eq. 3: y^ = Phi(x, y).
        if order == "answer_first":
            answer = f"{bare}\n{rationale}"
        else:
            answer = f"{rationale}\nThe answer is {bare}"
        expanded.append({**row, "answer": answer})
    return expanded


@checked
def write_rationales(
    rows: Sequence[Row],
    model: nn.Module,
    tokenizer: Any,
    *,
    order: Order = "answer_first",
) -> list[dict[str, str]]:
    """Have a chat model write each row's ``rationale`` by Fig. 3's prompt, in up to 200 tokens.

    The second order's instruction is ours: the paper prints only the first, though its example
    (Table 8) is of the second. A tokenizer without a chat template is asked in PESC's form.
    """
    for number, row in enumerate(rows):
        for name in ("prompt", "answer"):
            field(row, name, f"row {number}")
    requests = [FIGURE_3.format_map({**row, "order": ORDERS[order]}) for row in rows]
    contexts = [_chat_ids(request, tokenizer) for request in requests]
    texts = [text.strip() for text in generate(model, tokenizer, contexts, limit=200)]
    if "" in texts:
        refuse(
            "E-DATA",
            f"row {texts.index('')}: the model wrote no rationale; take another model",
        )
    return [{**row, "rationale": text} for row, text in zip(rows, texts, strict=True)]


def _chat_ids(request: str, tokenizer: Any) -> list[int]:
    """Tokenize a request to a chat model, as its tokenizer's template writes one."""
    if getattr(tokenizer, "chat_template", None):
        text = _templated(request, tokenizer)
        return list(tokenizer.encode(text, add_special_tokens=False))
    text, _ = camel(request, "")
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*start, *tokenizer.encode(text, add_special_tokens=False)]


def _templated(request: str, tokenizer: Any) -> str:
    """Write a request by the tokenizer's chat template; one that cannot is refused (E-MODEL)."""
    template = "the tokenizer's chat template"
    fix = "take another model, or tokenizer.chat_template = None for PESC's form"
    messages = [{"role": "user", "content": request}]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program: whatever it raises
        told = f"{type(error).__name__}: {error!s:.200}"
        refuse("E-MODEL", f"{template} fails on a request ({told}); {fix}")
    # Some trim it. Those that expect a list of parts find none in a text.
    if request.strip() not in text:
        refuse("E-MODEL", f"{template} leaves out what is asked; {fix}")
    return str(text)


def generate(
    model: nn.Module,
    tokenizer: Any,
    contexts: Sequence[list[int]],
    *,
    limit: int | Sequence[int],
    batch: int = 32,
) -> list[str]:
    """Continue contexts of token ids greedily, to the end token or the limit; dropout is off.

    ``limit`` is the most new tokens of every answer, or of each.
    """
    of_each = limit if isinstance(limit, Sequence) else [limit] * len(contexts)
    with evaluating(model):
        return InMemory(model, tokenizer, batch).answer(
            [list(context) for context in contexts], [(most, ()) for most in of_each]
        )


@checked
def log_perplexity(
    model: nn.Module,
    tokenizer: Any,
    bank: Bank,
    shots: Sequence[Row],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    tokens: Count | None = None,
) -> pd.DataFrame:
    """Measure the log-perplexity of each shot's answer under each LoRA (Eq. 1, 2), in nats.

    ``[N, S]``, indexed by name: the mean over the answer's tokens, its end token included
    (released), or their sum (Eq. 1 literally). Shots from `expand` give the reasoning perplexity.

    A row of the batch is one LoRA on a pack of shots (`packs`), no longer than the model is wide:
    attention then costs at most a sixth of the products. Dropout is off; the end of the last layer
    and the head run on the answers alone. A forward pass has so many ``tokens`` at most over its
    LoRAs, by default 2,048 on a CPU, where more would leave its cache, else 16,384.
    """
    items = _encoded(model, tokenizer, bank, shots)
    loras = list(bank.values())
    host, head = _readable(model)
    check_mixable(model, loras)
    most = tokens or (2048 if head.device.type == "cpu" else 16384)
    packed = packs(items, min(host.hidden, most))
    # LoRAs of one pass: as many as the longest pack leaves room for.
    together = max(1, most // max(len(pack.tokens) for pack in packed))
    nats = np.zeros((len(loras), len(items)))  # [N, S]
    with evaluating(model), torch.no_grad(), Products():
        # As few groups as that allows, whose sizes differ by one at most.
        for group in np.array_split(np.arange(len(loras)), -(-len(loras) // together)):
            with attached(model, [loras[number] for number in group]):
                for pack in packed:
                    scored = _nats(
                        model, host.decoder, head, pack, len(group), reduction
                    )
                    # The rows of these LoRAs, and the columns of this pack's shots.
                    nats[group[:, None], pack.lines] = scored
    return pd.DataFrame(nats, index=list(bank))


@checked
def accuracy(
    model: nn.Module,
    tokenizer: Any,
    bank: Bank,
    shots: Sequence[Row],
    *,
    post: Callable[[str], str] | None = None,
    limit: Count | None = None,
    own: Mapping[str, Task] = NONE,
) -> pd.DataFrame:
    """Say which shots each LoRA solves: greedy answers equal to the gold ones (Eq. 5), true or not.

    ``[N, S]``, indexed by name. Eq. 5 divides by N where it means K; the mean over a row is Acc.
    ``post`` is f of Eq. 5, applied to both answers. By default it is that of the row's task or data
    set (GSM8K's is the final number), else the first line. So are the most new tokens of the row's
    answer, else 64. ``own`` are tasks of users' files, by the names that their rows carry. A
    program (MBPP) solves a shot when it passes the row's tests, in a sandbox.
    """
    known = {**JUDGED, **own}
    tasks = [known.get(row.get("task", "")) for row in shots]
    pairs = zip(shots, tasks, strict=True)
    rights = [_right(row, task, post) for row, task in pairs]
    items = _encoded(model, tokenizer, bank, shots)
    # The prompt alone: what stands before the first labelled token.
    contexts = [item["input_ids"][: item["labels"].count(IGNORED)] for item in items]
    limits = [limit or (task.max_new_tokens if task else UNKNOWN) for task in tasks]
    solved = {}
    # One LoRA at a time: rows that have ended leave a batch, so that parts of it, one a
    # LoRA, would not stay equal as `attached` has them.
    for name, lora in progress(bank.items(), "accuracy", len(bank)):
        with attached(model, [lora]):
            texts = generate(model, tokenizer, contexts, limit=limits)
        # Eq. 5: 1(f(y~_i) = y_i) of each shot.
        solved[name] = [right(text) for right, text in zip(rights, texts, strict=True)]
    return pd.DataFrame.from_dict(solved, orient="index")


def scores(log_perplexities: pd.DataFrame, accuracies: pd.DataFrame) -> pd.DataFrame:
    """Bring both measures to one number a LoRA (Eq. 4, 5).

    LoRAs without a finite perplexity are left out. ``log_perplexity`` is the
    logarithm of the sum over shots of exp, in nats, ``accuracy`` a share.
    """
    if list(log_perplexities.index) != list(accuracies.index):
        refuse(
            "E-BANK",
            "perplexities and accuracies are of different LoRAs; score one bank",
        )
    both = {"log_perplexities": (log_perplexities.to_numpy(), "N K", "real")}
    both["accuracies"] = (accuracies.to_numpy(), "N K", "real")
    shapes("scores", both, empty="")
    if not ((accuracies >= 0) & (accuracies <= 1)).all(axis=None):
        refuse(
            "E-RANGE",
            "scores: accuracies hold numbers outside [0, 1], expected true or false",
        )
    nats = log_perplexities.to_numpy(dtype=np.float64)
    finite = np.isfinite(nats).all(axis=1)
    if not finite.all():
        names = ", ".join(log_perplexities.index[~finite])
        warnings.warn(
            f"W-NONFINITE: no finite perplexity from {names}; left out", stacklevel=2
        )
    if not finite.any():
        refuse(
            "E-BANK",
            f"none of {len(finite)} LoRAs has a finite perplexity on the shots",
        )
    # Eq. 4: PPL_R = sum over the K shots of PPL; here log PPL_R = log sum exp(log PPL),
    # which has the same order and cannot overflow.
    total = np.logaddexp.reduce(nats[finite], axis=1)
    # Eq. 5: Acc, the share of the K shots that a LoRA answers exactly.
    share = accuracies[finite].mean(axis=1).astype(np.float64)
    return pd.DataFrame({"log_perplexity": total, "accuracy": share})


def _right(
    row: Row, task: Task | Source | None, post: Callable[[str], str] | None
) -> Callable[[str], bool]:
    """Return what says whether an answer solves a row: f of Eq. 5, or the row's tests."""
    f = post or (task.normalise if task else first_line)
    if f:  # none where only running the answer tells
        return lambda text: f(text) == f(row["answer"])
    if "tests" not in row:
        why = "code is right when it passes tests, and this row has none"
        refuse("E-SANDBOX", f"task '{row['task']}': {why}; give post= to compare texts")
    sandbox.ready()
    wanted = _functions(row["answer"])

    def passes(text: str) -> bool:
        program = _named(text, wanted)
        # A function of Python's own name, as `sum`, is the program's, too.
        return sandbox.judged(program, tests=row["tests"], own=wanted) == "passed"

    return passes


def _functions(program: str) -> list[str]:
    return re.findall(r"^def (\w+)", program, re.MULTILINE)


def _named(program: str, wanted: Sequence[str]) -> str:
    """Give a program's last function the name of the solution's: Table 8's prompt names none."""
    names = _functions(program)
    # Nothing to name where one of them defines none, or the name is there.
    known = not names or not wanted or wanted[-1] in names
    return program if known else f"{program}\n{wanted[-1]} = {names[-1]}\n"


def _encoded(
    model: Any, tokenizer: Any, bank: Bank, shots: Sequence[Row]
) -> list[dict[str, Any]]:
    """Encode the shots, or refuse a bank or shots that the model cannot be scored on."""
    if not bank:
        refuse("E-BANK", "the bank is empty: nothing to score")
    check_alike(list(bank.values()))
    if not shots:
        refuse("E-KSHOT", "have 0 annotated rows, need at least K = 1")
    # Without a limit, which would leave shots out: too long ones are refused below.
    items = list(encode(shots, tokenizer, max_length=sys.maxsize))
    # A pack's own mask takes the place of the model's, with its sliding window.
    most = min(
        longest(model), getattr(model.config, "sliding_window", None) or sys.maxsize
    )
    lengths = [item["length"] for item in items]
    if max(lengths) > most:
        line = lengths.index(max(lengths))
        refuse(
            "E-KSHOT", f"shot {line} has {lengths[line]} tokens, the model takes {most}"
        )
    return items


def _readable(model: nn.Module) -> tuple[Anatomy, Tensor]:
    """Return a model's anatomy and its head's weight, if answers can be read off a pack by them."""
    host = anatomy(model)
    head = model.get_output_embeddings()
    for layer in host.layers:
        if layer.attention is None:
            refuse(
                "E-MODEL",
                f"layer {layer.index} has no attention: packed samples would mix",
            )
    name = type(model).__name__
    if not keeps_cache(model):
        kept = "keeps a state for a row, or places of its own"
        refuse("E-MODEL", f"{name} {kept}: packed samples would mix")
    more = [
        f"config.{name}"
        for name in LOGITS
        if getattr(model.config, name, 1) not in (None, 1)
    ]
    more += ["a bias"] if getattr(head, "bias", None) is not None else []
    if more:
        refuse("E-MODEL", f"the head of {name} has {more[0]}, expected one product")
    return host, head.weight


def _nats(
    model: nn.Module,
    decoder: nn.Module,
    head: Tensor,
    pack: Pack,
    loras: int,
    reduction: str,
) -> np.ndarray:
    """Return the answers' negative log-likelihoods ``[N, S]``, summed or averaged over tokens."""
    ids, positions, seen = (
        t.to(head.device) for t in (pack.tokens, pack.positions, pack.seen)
    )
    answers = Answers(*(part.to(head.device) for part in pack.answers))
    # Added to the scores of attention: 0 where a token is seen, else minus infinity.
    mask = torch.zeros(seen.shape, dtype=head.dtype, device=head.device)
    with trimmed(model, loras, len(ids), answers.readers.unique()):
        # The decoder alone: the head is for the answers' readers, in `bank_scoring`.
        hidden = decoder(
            input_ids=ids.expand(loras, -1),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            attention_mask=mask.masked_fill_(~seen, -torch.inf)[None, None],
        ).last_hidden_state  # [N, T, D]
    # Eq. 1 and 2, their exponent: -sum_i log P(y_i | x, y_<i), [N, S].
    nats = bank_scoring(hidden, head, answers)
    # As released the mean over the |y| tokens; as printed the sum.
    reduced = {"mean": nats / answers.lengths, "sum": nats}
    return reduced[reduction].cpu().numpy()


class Pack(NamedTuple):
    """Samples as a tree of T tokens: each token sees those before it in its own sample alone."""

    lines: list[int]  # numbers of the S samples, in the order of their answers
    tokens: Tensor  # [T], without the last one of a sample, which predicts nothing
    positions: Tensor  # [T], the place of a token in its samples
    seen: Tensor  # [T, T], true where the token of the row sees that of the column
    answers: Answers  # where the answers stand in the tree


def packs(items: Sequence[Item], limit: int) -> list[Pack]:
    """Pack samples that begin alike together, up to a limit of tokens; longer ones alone."""
    groups: list[list[int]] = []
    before: list[int] = []  # tokens of the sample before
    size = 0  # of the group at hand, in tokens
    # In the order of their tokens, so samples that begin alike are neighbours.
    for line in sorted(range(len(items)), key=lambda line: items[line]["input_ids"]):
        ids = items[line]["input_ids"][:-1]  # the last token predicts nothing
        fresh = len(ids) - _shared(before, ids)  # tokens that it adds to the tree
        if not groups or size + fresh > limit:
            groups.append([])
            size = 0
            fresh = len(ids)
        groups[-1].append(line)
        size += fresh
        before = ids
    return [_pack(items, lines) for lines in groups]


def _pack(items: Sequence[Item], lines: list[int]) -> Pack:
    """Grow the tree sample by sample: what a sample shares with the one before it stands there."""
    # Of each token of the tree: its id, its place in its samples, the token before it.
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    # Of each answer: the tokens whose logits foretell it, what it is, and how long.
    readers: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    path: list[int] = []  # tokens of the tree that the sample at hand runs through
    before: list[int] = []
    for line in lines:
        ids = items[line]["input_ids"]
        first = items[line]["labels"].count(IGNORED)  # token of the answer
        path = path[: _shared(before, ids[:-1])]
        for place in range(len(path), len(ids) - 1):
            # The first of a sample has itself.
            parents.append(path[-1] if path else len(tokens))
            path = [*path, len(tokens)]
            tokens.append(ids[place])
            positions.append(place)
        # The token at place i predicts that at i + 1.
        readers += path[first - 1 :]
        targets += ids[first:]
        lengths.append(len(ids) - first)
        before = ids[:-1]
    seen = np.eye(len(tokens), dtype=bool)  # [T, T]
    # What its parent sees and itself; a parent comes first, so its row is done.
    for token, parent in enumerate(parents):
        seen[token] |= seen[parent]
    answers = Answers(
        torch.tensor(readers), torch.tensor(targets), torch.tensor(lengths)
    )
    return Pack(
        lines,
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.from_numpy(seen),
        answers,
    )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two samples begin with alike."""
    return sum(takewhile(bool, map(eq, one, other)))


class Products(TorchFunctionMode):
    """Linear layers multiply on a CPU, in this block, by `kernels.matmul`: without a gradient."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take the call of a linear layer; leave any other as it is."""
        if func is not F.linear or kwargs or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        if args[0].dim() < 2:  # a vector, which has no rows
            return func(*args)
        x, weight, bias = (*args, None)[:3]
        # [rows, D] @ [D, O]
        y = product(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])
        return y if bias is None else y.add_(bias)


@contextmanager
def trimmed(
    model: nn.Module, loras: int, tokens: int, places: Tensor
) -> Iterator[None]:
    """Leave out, in this block, what scoring one pack under N LoRAs can do without.

    Inside `attached`, with one row a LoRA and the same T tokens in all rows, read at some places in
    [0, T) alone. Products before the first LoRA are of one row, and of the last layer queries and
    what follows are needed at the places alone: zeros stand for the others.
    """
    shared, ends = spared(model)

    def filled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # [N, places, O] to [N, T, O].
        return output.new_zeros(loras, tokens, output.shape[-1]).index_copy_(
            1, places, output
        )

    def spread(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # [1, T, O] to [N, T, O]; a part with LoRAs has N rows already, by their hook.
        return output.expand(loras, -1, -1)

    with ExitStack() as hooks:
        # All rows are the same tokens, and alike until the first LoRA: one will do.
        for part in shared:
            hooks.enter_context(
                part.register_forward_pre_hook(lambda _, args: args[0][:1])
            )
            hooks.enter_context(part.register_forward_hook(spread))
        # Behind the last keys and values no place reads another: zeros will do there.
        for part in ends:
            hooks.enter_context(
                part.register_forward_pre_hook(lambda _, args: args[0][:, places])
            )
            hooks.enter_context(part.register_forward_hook(filled))
        yield


def spared(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the parts that `trimmed` runs for one row alone, and those for the places alone."""
    layers = anatomy(model).layers
    first = layers[0]
    last = layers[-1]
    # Of the last layer not k_proj and v_proj: the places see keys and values of all T.
    shared = [
        getattr(first.attention, name, None) for name in ("q_proj", "k_proj", "v_proj")
    ]
    ends = [getattr(last.attention, name, None) for name in ("q_proj", "o_proj")]
    ends += [last.mlp] if last.kind == "dense" else []
    return [part for part in shared if part], [part for part in ends if part]
