"""A case of a whole training step: PESC's sparse arm with LoRA, on the embedded base."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook import models, runtime
from moebook import nn as mnn
from moebook.data import draw, encode, tasks
from moebook.kernels import Routing
from moebook.lab.bench.case import Case, Run, Shapes, dense, listed, peer, size_of
from moebook.lab.bench.timing import Contender
from moebook.methods import pesc
from moebook.models.anatomy import anatomy
from moebook.models.lora import LoraLinear
from moebook.training.batches import Batches

ROWS = 100  # that are drawn of each task
LONGEST = 160  # tokens of a row
HOST = "transformers' layers, our products"
CLIP = 0.3  # norm of the gradient at most, as in PESC's protocols
Batch = dict[str, Any]


def pesc_step(
    device: torch.device, B: int, E: int, R: int, K: int = 2, bits: int = 32
) -> Case:
    """Forward and backward pass, balance loss, clipping and AdamW for B rows of the tasks.

    E adapters of width R, K a token; LoRA of rank 16 on all linear layers, dropout before both. In
    64 ``bits`` the peer draws its dropout as ours does, so that both compute the same.

    `HOST` is what no code of ours could go below: transformers' layers as they are,
    and the products of LoRA, routers and adapters, without anything else that these do.
    """
    runtime.seed_everything(0)
    base, tokenizer = models.load("nano", device=str(device))
    host = frozen_host(copy.deepcopy(base))
    config = pesc.Config(experts=E, top_k=K, adapter_width=R, host="lora", lora_rank=16)
    sparse = pesc.prepare(base, config).train()
    # Half of them start at zero, and with them most gradients would be zero.
    for parameter in trained(sparse):
        nn.init.normal_(parameter, std=0.02)
    if bits == 64:
        sparse.double()
    plain = looped(copy.deepcopy(sparse), same_draws=bits == 64)

    batch = {name: tensor.to(device) for name, tensor in _batch(tokenizer, B).items()}

    case = Case(size_of(*sparse.parameters()), torch.ones((), device=device))
    case.leaves += [*trained(sparse), *trained(plain)]
    case.add("ours", partial(_loss, sparse, batch), after=_update(sparse))
    counts = step_products(sparse, batch)
    case.flops = sum(product.flops for product in listed(counts))
    multiply = dense(listed(counts), device, torch.float32).run
    attend = _attention(sparse.config, batch)

    def floor() -> None:
        multiply()
        attend()

    case.contenders.append(Contender("floor", floor))

    added = counts - step_products(host, batch)
    beside = dense(listed(added), device, torch.float32).run

    def around_host() -> None:
        _likelihood(host, batch).backward()
        beside()

    case.contenders.append(Contender(HOST, around_host))
    case.add("plain loop with PEFT", partial(_loss, plain, batch), after=_update(plain))
    return case


def _batch(tokenizer: Any, size: int) -> Batch:
    """Return the batch of an epoch over the tasks' rows whose tokens are nearest to the mean."""
    rows = encode(
        draw(list(tasks.CATALOGUE), "train", ROWS), tokenizer, max_length=LONGEST
    )
    batches = Batches(rows, size, seed=0, pad_id=tokenizer.pad_token_id)
    steps = range(batches.per_epoch - 1)  # the last may have fewer rows
    mean = sum(batches.tokens(step) for step in steps) / len(steps)
    return batches[min(steps, key=lambda step: abs(batches.tokens(step) - mean))]


def _likelihood(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the likelihood's loss and the balance loss (PESC Eq. 10)."""
    return _likelihood(model, batch) + pesc.balance_loss(model)


def frozen_host(model: nn.Module) -> nn.Module:
    """Freeze a dense model; gradients end where the step's do, at the first layer's q, k and v."""
    model.train().requires_grad_(False)
    attention = anatomy(model).layers[0].block.self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.register_forward_hook(lambda _, inputs, y: y.detach().requires_grad_())
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _update(model: nn.Module) -> Run:
    """Return what follows the backward pass: clipping, and AdamW as `training.fit` makes it."""
    parameters = trained(model)
    adamw = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        adamw.step()

    return update


def looped(model: nn.Module, *, same_draws: bool = False) -> nn.Module:
    """Turn a model of ours, in place, into what one would write first: loops, and PEFT's layers.

    Dropout is torch's, or ours with ``same_draws``.
    """
    for module in model.modules():
        if isinstance(module, mnn.AdapterMoE):
            module.adapters = LoopedAdapters(module.adapters, same_draws)
        if isinstance(module, LoraLinear):
            module.__class__ = peer("peft.tuners.lora").Linear
            for name, part in module.lora_dropout.items():
                if not same_draws:
                    module.lora_dropout[name] = nn.Dropout(part.p)
    return model


class LoopedAdapters(nn.Module):
    """PESC's adapters one after another, each on the tokens that chose it."""

    def __init__(self, ours: mnn.Adapters, same_draws: bool) -> None:
        super().__init__()
        self.down = ours.down  # [E, D, R]
        self.up = ours.up  # [E, R, D]
        self.share = ours.dropout
        self.drop = mnn.dropout if same_draws else F.dropout

    def forward(self, h: Tensor, routing: Routing) -> Tensor:
        """Return ``h + sum_k w_k gelu(h D_k) U_k`` for ``h [T, D]``."""
        source = self.drop(h, self.share)
        y = h
        for expert, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            token, slot = (routing.ids == expert).nonzero().unbind(1)
            gate = routing.weights[token, slot].to(h.dtype)
            output = F.gelu(source[token] @ down) @ up
            y = y.index_add(0, token, gate[:, None] * output)
        return y


def step_products(model: nn.Module, batch: Batch) -> Shapes:
    """Count the products of a step: each layer's, its gradients', and none for what is frozen.

    A pass tells how many rows each layer reads, and whether their gradient is asked for: that of
    the first layer's queries, keys and values is not.
    """
    shapes = Shapes()

    def count(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        rows = x.numel() // x.shape[-1]
        graded = int(x.requires_grad)  # one product more
        if isinstance(layer, LoraLinear):
            width = layer.in_features
            out = layer.out_features
            rank = layer.lora_A["default"].out_features
            shapes[rows, width, out] += 1 + graded
            shapes[rows, width, rank] += 2 + graded  # A x, and the gradients of A and x
            shapes[rows, rank, out] += 3
        elif isinstance(layer, mnn.Router):
            experts, width = layer.weight.shape
            shapes[rows, width, experts] += 2 + graded
        elif isinstance(layer, mnn.Adapters):
            _, width, rank = layer.down.shape
            slots = inputs[1].ids.numel()
            shapes[slots, width, rank] += 6
        else:
            shapes[rows, layer.in_features, layer.out_features] += 1 + graded

    kinds = LoraLinear, mnn.Router, mnn.Adapters, nn.Linear
    handles = []
    for name, part in model.named_modules():
        in_lora = "lora_" in name or "base_layer" in name  # counted with their LoRA
        if isinstance(part, kinds) and not in_lora:
            handles.append(part.register_forward_pre_hook(count))
    model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return shapes


def _attention(config: Any, batch: Batch) -> Run:
    """Return PyTorch's attention with the batch's mask, forward and backward, in every layer."""
    mask = batch["attention_mask"].bool()  # [B, T]
    rows, length = mask.shape
    causal = mask.new_ones(length, length).tril()
    seen = causal & mask[:, None, None, :]  # [B, 1, T, T]
    shape = (rows, config.num_attention_heads, length, config.head_dim)
    query, key, value = (
        torch.randn(shape, device=mask.device, requires_grad=True) for _ in range(3)
    )
    cotangent = torch.randn(shape, device=mask.device)

    def attend() -> None:
        for _ in range(config.num_hidden_layers):
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
            torch.autograd.grad(output, (query, key, value), cotangent)

    return attend
