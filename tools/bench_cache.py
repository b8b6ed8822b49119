"""Decode with `BoundedCache` and with the library's full cache: memory and tokens a second.

Usage: python tools/bench_cache.py [--length 16384 65536] [--tokens 8]

A random Llama without RoPE on a window; the caches are filled with random keys and values, as a
prompt of that length would, since only decoding is measured. Both decode the same tokens in turn.
"""

import argparse
import statistics
import time

import plsh_torch.transformers as on_plsh
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import plsh


def model_of(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.heads * args.dim,
        intermediate_size=2 * args.heads * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=1 << 20,
    )
    model = LlamaForCausalLM(config).eval()
    return on_plsh.switch(model, plsh.Window(tol=args.tol), rope=False)


def fill(caches: dict, args: argparse.Namespace, length: int) -> None:
    """Put the same random tokens into every cache, a layer at a time."""
    generator = torch.Generator().manual_seed(0)
    for layer in range(args.layers):
        shape = (1, args.heads, length, args.dim)
        key, value = (torch.randn(shape, generator=generator) for _ in range(2))
        for cache in caches.values():
            cache.update(key, value, layer)


def held(cache) -> int:
    """Return the bytes of keys and values."""
    if isinstance(cache, on_plsh.BoundedCache):
        return cache.nbytes
    pairs = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum(x.numel() * x.element_size() for x in pairs)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tol", type=float, default=1e-6)
    args = parser.parse_args()
    model = model_of(args)
    print("| tokens before | cache | MiB | tokens/s | largest difference of a logit |")
    print("|---|---|---|---|---|")
    for length in args.length:
        caches = {
            "full": DynamicCache(),
            "bounded, per layer": on_plsh.BoundedCache(model, per_head=False),
            "bounded, per head": on_plsh.BoundedCache(model),
        }
        fill(caches, args, length)
        times: dict[str, list[float]] = {name: [] for name in caches}
        off = dict.fromkeys(caches, 0.0)
        for step in range(args.tokens + 1):
            token = torch.tensor([[step % 256]])
            logits = {}
            for name, cache in caches.items():
                begin = time.perf_counter()
                logits[name] = model(token, cache=cache, use_cache=True).logits
                if step:  # the first call warms up
                    times[name].append(time.perf_counter() - begin)
            for name, found in logits.items():
                off[name] = max(off[name], (found - logits["full"]).abs().max().item())
        for name, cache in caches.items():
            rate = 1 / statistics.median(times[name])
            print(
                f"| {length} | {name} | {held(cache) / 2**20:.1f} | {rate:.1f} | {off[name]:.1e} |"
            )


if __name__ == "__main__":
    main()
