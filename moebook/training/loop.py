"""One way to train: a loop over accelerate, reproducible step by step, stopped by the first NaN."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, parse_flag_from_env, send_to_device
from datasets import Dataset as Rows
from pydantic import Field, SkipValidation
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from moebook import results, runtime
from moebook.errors import Refusal, refuse, shown
from moebook.models import fingerprint
from moebook.models.anatomy import longest
from moebook.models.conventions import check
from moebook.nn import ChosenRows, plain
from moebook.nn.batch import check_batch, vocabulary
from moebook.settings import Count, Place, Positive, Share, checked, settings
from moebook.training import checkpoints
from moebook.training.batches import Batches
from moebook.training.checkpoints import History
from moebook.training.precision import widen

SCHEDULES = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
UNDECAYED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
LOST = re.compile("gloo|NCCL", re.IGNORECASE)  # in what torch says of a broken connection
Penalty = Callable[[Any], Tensor]
Milestones = Sequence[tuple[Collection[int], Callable[[Any], Any]]]


@settings
class Recipe:
    """What decides a training, beside model and rows.

    After the warm-up the rate is constant, or goes down to 0 in a line, in a cosine, or in a line
    over the last fifth of all steps (``"wsd"``). The paged optimizers are bitsandbytes' AdamW, in
    main memory when the GPU is full.
    """

    # Of the optimizer; else one epoch.
    steps: Annotated[int, Field(ge=1, le=10**8)] | None = None
    # Or these, rounded up to whole steps.
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    batch: Count = 32  # B, rows a step, of all processes together
    lr: Annotated[float, Field(gt=0, le=100)] = 2e-4
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup: Share = 0.03  # of the steps, over which the rate rises linearly from 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # of all but biases and normalisations
    betas: tuple[Share, Share] = (0.9, 0.999)
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0  # norm of the gradient at most
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    accumulate: Count = 1  # parts of a step that each process computes in turn, to save memory
    optimizer: Literal["adamw", "paged_32bit", "paged_8bit"] = "adamw"
    bf16: bool = False  # computes under torch's autocast, whatever the parameters are in
    rates: dict[str, Positive] | None = None  # by a name on a parameter's path; none decays

    def __post_init__(self) -> None:
        if self.steps and self.epochs:
            refuse("E-USAGE", f"steps = {self.steps}, epochs = {self.epochs}: give one of them")


@checked
def fit(
    model: nn.Module,
    train: Rows,
    *,
    penalty: Penalty | None = None,
    milestones: SkipValidation[Milestones] = (),
    label: str = "",
    pad_id: int = 0,
    output: Place | None = None,
    every: Count = 500,
    shards: Any = None,
    **recipe: Any,
) -> History:
    """Train the parameters that require a gradient on the labelled tokens of the rows, with AdamW.

    What trains is float32 or wider: parameters in 16 bits become float32 in the model, and stay so;
    where a host in 16 bits cannot compute with them the training is refused (E-DTYPE, see
    `training.precision`). Frozen parameters, and so most products, keep the host's dtype.

    Rows, dropout and noise depend on seed and step alone: torch's generators are seeded anew at
    each step. So two runs are equal bit for bit (at one number of threads), also when one was
    interrupted and goes on. Random states and training mode stay as they were.

    Under ``accelerate launch`` every process trains on its part of every batch, data parallel or by
    FSDP2 (``shards``, which `training` sets there); all share the folder of checkpoints. Loss and
    penalty are means over the whole batch: one process or several, whole or accumulated, give the
    same numbers up to rounding, but dropout draws others, and a balance loss (the product of two
    means) is that of each part. With FSDP2 a penalty gets the model in shards, a milestone the
    whole one, in every process; what breaks training off, but for a refused step, leaves the model
    empty (E-PROCESS: another process has ended).

    The loss is the likelihood of the next token alone: what a configuration adds to it (a balance
    loss by ``output_router_logits``) would depend on how rows are batched, and is left out. A model
    that looks ahead, or whose own loss is another, is refused.

    Rows have ``input_ids`` and ``labels`` (-100: nothing is learnt). ``penalty`` is called with the
    model after each forward pass, and its scalar added to the loss. ``milestones`` are numbers of
    steps done, from 0, and what to call with the model then; it must leave the parameters alone. A
    folder ``output`` keeps checkpoints (every so many steps, every five minutes or more, at
    milestones and at the end), and training goes on from the newest of the same run; a notebook
    under `moebook run` has one unasked (`training.checkpoints`). ``recipe`` holds fields of
    `Recipe`. A loss or gradient that is not finite is refused before it moves a parameter.
    """
    plan = Recipe(**recipe)
    if output is not None and not os.fspath(output).strip():
        refuse("E-PATH", "output is empty, expected a folder for checkpoints, or None for none")
    batches = Batches(train, plan.batch, seed=plan.seed, pad_id=pad_id)
    batches.check(vocabulary(model), longest(model))
    _check_decay(model, plan)
    total = plan.steps or math.ceil((plan.epochs or 1) * batches.per_epoch)
    device = next(model.parameters()).device
    with ExitStack() as cleanup:
        cleanup.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        cleanup.callback(model.train, model.training)
        cleanup.enter_context(plain(model))
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.bf16):
            check(model, loss=True)
        marks = frozenset(step for steps, _ in milestones for step in steps)
        if odd := [mark for mark in marks if not isinstance(mark, Integral)]:
            refuse("E-TYPE", f"milestones name step {shown(odd[0])}, expected a whole number")
        accelerator, shards = _accelerator(model, plan, shards)
        widen(model)
        store = _store(model, plan, batches, total, output, every, marks, shards)
        if store and accelerator.is_main_process:
            cleanup.enter_context(store.locked())
        cleanup.enter_context(_together())
        accelerator.wait_for_everyone()  # whoever held the folder has gone
        trained = shards.twin(model) if shards else model
        wrapped, adamw = accelerator.prepare(trained, _optimizer(trained, plan))
        warmup = math.ceil(plan.warmup * total)
        name = SCHEDULES.get(plan.schedule, plan.schedule)
        falling = {"num_decay_steps": math.ceil(total / 5), "decay_type": "linear"}
        options = falling if plan.schedule == "wsd" else None
        rates = get_scheduler(name, adamw, warmup, total, scheduler_specific_kwargs=options)
        measure = partial(_measure, model, trained, milestones)
        history = _resumed(store, (trained, adamw, rates), len(milestones), measure, marks, total)
        _release(model, trained)
        left = range(len(history.step), total)
        began = time.perf_counter() - (history.seconds or [0.0])[-1]
        for step in runtime.progress(left, label, len(left)):
            measure(step, history)
            found = _gradient(accelerator, wrapped, batches, plan, step, penalty)
            if not math.isfinite(sum(found)):
                trained.zero_grad()
                _gather(model, trained)
                _stop(step, found, batches, store)
            adamw.step()
            rates.step()
            trained.zero_grad()
            tokens = batches.tokens(step) + (history.tokens or [0])[-1]
            line = (step + 1, *found, time.perf_counter() - began, tokens)
            for column, value in zip(history.columns().values(), line, strict=True):
                column.append(value)
            if store:
                _save_if_due(store, trained, adamw, history, total)
        accelerator.wait_for_everyone()  # the last checkpoint is there for all of them
        _gather(model, trained)
        _measure(model, model, milestones, total, history)
    return history


def _check_decay(model: nn.Module, plan: Recipe) -> None:
    """Refuse weight decay where a part of a parameter is to stay as it is."""
    partly = [name for name, part in model.named_modules() if isinstance(part, ChosenRows)]
    if partly and plan.weight_decay:
        refuse(
            "E-CHOICE",
            f"weight_decay is {plan.weight_decay}, but only some rows of {partly[0]} are to train, "
            "and decay would shrink the others too: set weight_decay=0",
        )


def _save_if_due(
    store: checkpoints.Store, trained: nn.Module, adamw: Optimizer, history: History, total: int
) -> None:
    """Save a checkpoint if the first process says so: it alone, or with FSDP2 all of them."""
    due = runtime.processes()[0] == 0 and store.due(history.seconds, total, trained)
    if store.shards:
        (due,) = broadcast_object_list([due])
    if due:
        # A disk may be full: that ends no training that was not asked to save.
        with nullcontext() if store.asked else suppress(Refusal):
            store.save(trained, adamw, history)


def _stop(
    step: int, found: tuple[float, float, float], batches: Batches, store: checkpoints.Store | None
) -> NoReturn:
    """Refuse a step whose loss, penalty or gradient is not finite."""
    loss, extra, norm = found
    last = max(store.steps(), default=0) if store else None
    saved = f"last checkpoint: step {last}" if store else "unsaved"
    text = f"step {step + 1}: loss {loss}, penalty {extra}, gradient norm {norm}"
    text += f" on rows {batches.rows(step).tolist()}; the model is as after step {step}"
    refuse("E-NONFINITE", f"{text} ({saved}): lower lr")


@contextmanager
def _together() -> Iterator[None]:
    """Tell in one line that another process has gone, on which torch ends in a long error."""
    try:
        yield
    except RuntimeError as error:
        if runtime.processes()[1] == 1 or not LOST.search(str(error)):
            raise
        refuse("E-PROCESS", f"another process of this training has ended ({error!s:.200}): see its "
               "output and start all again; training goes on from its last checkpoint")  # fmt: skip


def _store(
    model: nn.Module, plan: Recipe, batches: Batches, total: int, output: Place | None,
    every: int, marks: frozenset[int], shards: Any,
) -> checkpoints.Store | None:  # fmt: skip
    """Name the folder that was asked for, or that of a notebook's run; else there is none."""
    if output is None and runtime.RESUME not in os.environ:
        return None
    run = json.loads(json.dumps(asdict(plan))) | {"steps": total, "epochs": None}
    run |= {"data": batches.digest(), "model": fingerprint(model)}
    name = run if shards else run | {"processes": runtime.processes()[1]}
    place = checkpoints.place(model, name) if output is None else Path(output)
    (folder,) = broadcast_object_list([place])  # others may be on another machine
    made = {"run": run, "every": every, "marks": marks, "shards": shards}
    return checkpoints.Store(folder=folder, asked=output is not None, **made) if folder else None


def _resumed(
    store: checkpoints.Store | None, state: tuple[nn.Module, Optimizer, LambdaLR],
    milestones: int, measure: Callable[[int, History], None], marks: frozenset[int], total: int,
) -> History:  # fmt: skip
    """Go to the newest checkpoint; what was measured before it is measured anew, from its mark."""
    history = History(milestones=[{} for _ in range(milestones)])
    steps = store.steps() if store else []
    newest = max(steps, default=0)
    if missed := {mark for mark in marks - {0, *steps} if not newest <= mark <= total}:
        reason = f"the training goes from step {newest} to {total}"
        refuse("E-RANGE", f"milestone at step {min(missed)}: {reason}")
    for mark in sorted(mark for mark in marks if mark < newest):
        if store and mark:
            store.restore(*state, mark)
        measure(mark, history)
    if store and newest:
        history = replace(store.restore(*state, newest), milestones=history.milestones)
        if not store.asked:  # what the run's time counts in
            results.write(store.folder / runtime.FOUND, str(history.seconds[-1]))
    return history


def _accelerator(model: nn.Module, plan: Recipe, shards: Any) -> tuple[Accelerator, Any]:
    """Join the other processes; return what shards, if FSDP2 is to shard what they train."""
    AcceleratorState._reset_state(reset_partial_state=True)  # else the first device is for good
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    on_cpu = next(model.parameters()).device.type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[unused])
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and not shards:
        refuse("E-CHOICE", "ACCELERATE_USE_FSDP was set too late: start with accelerate launch")
    shards = shards if shards and shards.adopt(accelerator) else None
    known = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP" if shards else "")
    if (kind := accelerator.distributed_type) not in known:
        refuse("E-CHOICE", f"{kind} is not supported: launch with --multi_gpu, or with FSDP2")
    if shards and plan.optimizer != "adamw":
        refuse("E-CHOICE", f"optimizer {plan.optimizer} takes no shards; with FSDP2 use adamw")
    in_parts = plan.accumulate * accelerator.num_processes > 1
    if in_parts and not getattr(model, "accepts_loss_kwargs", True):
        refuse("E-MODEL", f"{type(model).__name__} averages its loss: one process, one part")
    return accelerator, shards


def _gradient(
    accelerator: Accelerator, wrapped: nn.Module, batches: Batches, plan: Recipe, step: int,
    penalty: Penalty | None,
) -> tuple[float, float, float]:  # fmt: skip
    """Compute the clipped gradient of a step; return its loss, its penalty and the former norm."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    model = accelerator.unwrap_model(wrapped)
    seeds = [plan.seed, step, *([rank] if rank else [])]
    torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
    wrapped.train()
    labels = torch.tensor(batches.labels(step), device=accelerator.device)
    sums, parts = torch.zeros(2, dtype=torch.double).to(labels.device), plan.accumulate * processes
    for part in range(rank, parts, processes):
        batch, share = batches.part(step, part, parts)
        batch = send_to_device(batch, accelerator.device)
        more = part + processes < parts
        late = more and accelerator.distributed_type != "FSDP"  # which would hold them whole
        with accelerator.no_sync(wrapped) if late else nullcontext():
            with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=plan.bf16):
                loss = wrapped(**batch, num_items_in_batch=labels, use_cache=False).loss
            # Losses are summed over the parts, but gradients averaged over the processes.
            loss = loss * processes
            extra = torch.zeros_like(loss)
            if penalty:
                extra = _extra(penalty, model) * (processes * share)
            accelerator.backward(loss + extra)
        sums += torch.stack([loss.detach(), extra.detach()])
    norm = float(accelerator.clip_grad_norm_(wrapped.parameters(), plan.clip))
    loss, extra = accelerator.reduce(sums, "mean").tolist()
    return loss, extra, norm


def _extra(penalty: Penalty, model: nn.Module) -> Tensor:
    """Return what a penalty adds to the loss: a tensor of one number."""
    value = penalty(model)
    if not isinstance(value, Tensor) or value.dim():
        got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        refuse("E-SHAPE", f"penalty returns {got}, expected a tensor of one number, as the loss")
    return value


def _optimizer(model: nn.Module, plan: Recipe) -> Optimizer:
    """Make AdamW over what requires a gradient; biases and normalisations do not decay."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], UNDECAYED))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        refuse("E-MODEL", "no parameter requires a gradient; nothing would be trained")
    rates, groups = plan.rates or {}, dict[Any, dict[str, Any]]()
    for name, parameter in trained:
        own = next((rate for rate in rates if rate in name.split(".")), None)
        decay = plan.weight_decay if own is None and name in decayed else 0.0
        new = {"params": [], "weight_decay": decay, "lr": rates[own] if own else plan.lr}
        groups.setdefault((own, decay), new)["params"].append(parameter)
    if unused := rates.keys() - {own for own, _ in groups}:
        refuse("E-NAME", f"rates names '{min(unused)}', but no such parameter is trained")
    if plan.optimizer == "adamw":
        return torch.optim.AdamW([*groups.values()], betas=plan.betas, fused=True)
    if not trained[0][1].is_cuda:
        refuse("E-DEVICE", f"optimizer {plan.optimizer} needs a GPU, the model is on none")
    try:
        from bitsandbytes import optim
    except ImportError:
        refuse("E-DEP", f"optimizer {plan.optimizer} needs a package: pip install bitsandbytes")
    bits, manager = 8 if plan.optimizer == "paged_8bit" else 32, optim.GlobalOptimManager
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # for which 8 bits are too few, its authors say
            manager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
    return optim.AdamW([*groups.values()], betas=plan.betas, is_paged=True, optim_bits=bits)


def _release(model: nn.Module, trained: nn.Module) -> None:
    """Free what a model holds whole and its twin in shards."""
    for own, part in zip(model.parameters(), trained.parameters(), strict=True):
        if isinstance(part, DTensor):
            own.data = own.data.new_empty(0)


def _gather(model: nn.Module, trained: nn.Module) -> None:
    """Give a model all values of its twin; where it is its own twin it has them."""
    for own, part in zip(model.parameters(), trained.parameters(), strict=True):
        if isinstance(part, DTensor):
            own.data = part.detach().full_tensor()


def _measure(
    model: nn.Module, trained: nn.Module, milestones: Milestones, step: int, history: History
) -> None:
    """Call what belongs to a milestone with the whole model."""
    for (steps, measure), measured in zip(milestones, history.milestones, strict=True):
        if step in steps:
            _gather(model, trained)
            with torch.random.fork_rng():
                torch.manual_seed(step)  # whether the steps before it were done just now or not
                measured[step] = measure(model)
            _release(model, trained)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one training step holds at its fullest, apart from work space."""

    parameters: int  # and buffers
    kept: int  # by autograd for the backward pass, parameters left out, each tensor once
    trained: int  # gradients and AdamW's two moments of the parameters that require a gradient

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.parameters + self.kept + self.trained


def step_memory(model: nn.Module, batch: Mapping[str, Tensor]) -> StepMemory:
    """Count the bytes of a training step with AdamW by one pass ``model(**batch)``, in its mode.

    What trains becomes float32 or wider first, as in `fit`. The model may be any module; a batch
    of token ids is checked.
    """
    if hasattr(model, "get_input_embeddings"):  # else it is called with whatever it takes
        check_batch("step_memory", model, batch, needs=["labels"])
    widen(model)
    storages = (part.untyped_storage() for part in model.state_dict().values())
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}  # tied ones once
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.random.fork_rng():
        output = model(**batch)  # held until the end, else its storages could be used twice
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    del output
    return StepMemory(sum(weights.values()), sum(kept.values()), 3 * trained)
