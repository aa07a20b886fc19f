#!/usr/bin/env python3
"""Times PyTorch's attention on the shapes of the benchmark: scaled_dot_product_attention in float16, and a latent cache in
bfloat16 by it or by two products, whichever is faster.

usage: torch_attention.py RESULTS

RESULTS is the output of bench. Prints `time torch/... microseconds` for the fastest backend that accepts the shape, and
`ratio NAME/torch VALUE`: PyTorch's time divided by the library's. The method is that of bench: a graph of several calls over
copies of the data that together exceed the L2, and medians.
"""
import re
import statistics
import sys

try:
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print("skipped: no PyTorch")
    sys.exit(0)

N_KV_HEADS = 8
SEVERAL_CACHES = 400 << 20
REPLAYS = 9


def replay(graph):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(REPLAYS + 2):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found[2:])


def time_calls(calls):
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay(graph) / len(calls)


def attention_calls(q, caches, backend, causal):
    def call(k, v):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)

    n_calls = max(8, len(caches))
    return [lambda k=k, v=v: call(k, v) for k, v in (caches * n_calls)[:n_calls // len(caches) * len(caches)]]


def lower_right(n_queries, positions):
    if n_queries == 1:
        return None
    from torch.nn.attention.bias import causal_lower_right
    return causal_lower_right(n_queries, positions)


def best_time(head_dim, group, n_queries, positions, dtype, backends):
    """(microseconds, backend, masked) of the fastest backend, or None if no backend runs the shape."""
    size = 2 * N_KV_HEADS * positions * head_dim * torch.finfo(dtype).bits // 8
    shape = (1, N_KV_HEADS, positions, head_dim)
    caches = [(torch.randn(shape, device="cuda", dtype=dtype), torch.randn(shape, device="cuda", dtype=dtype))
              for _ in range(max(1, min(64, -(-SEVERAL_CACHES // size))))]
    q = torch.randn((1, N_KV_HEADS * group, n_queries, head_dim), device="cuda", dtype=dtype)
    found = []
    for backend in backends:
        for causal in {id(m): m for m in (lower_right(n_queries, positions), None)}.values():
            try:
                found.append((time_calls(attention_calls(q, caches, backend, causal)), backend.name, causal is not None))
            except Exception:  # not every backend accepts every shape
                torch.cuda.synchronize()
    return min(found) if found else None


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        lines = [line.split() for line in f]
    times = {line[1]: float(line[2]) for line in lines if len(line) == 3 and line[0] == "time"}
    pattern = re.compile(r"attend/[^/]+/d(\d+)/g(\d+)/q(\d+)/(\d+)$")
    shapes = sorted({tuple(int(x) for x in m.groups()) for m in map(pattern.match, times) if m})
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    print(f"torch {torch.__version__} {torch.cuda.get_device_name()}")
    for head_dim, group, n_queries, positions in shapes:
        best = best_time(head_dim, group, n_queries, positions, torch.float16, backends)
        suffix = f"d{head_dim}/g{group}/q{n_queries}/{positions}"
        if best is None:
            print(f"torch/{suffix}: no backend accepts it")
            continue
        print(f"time torch/f16/{suffix} {best[0]:.2f} {best[1]}{' masked' if best[2] else ''}", flush=True)
        for name, microseconds in times.items():
            if name.startswith("attend/") and name.endswith("/" + suffix):
                print(f"ratio {name}/torch {best[0] / microseconds:.3f}")
    time_full_precision(times)
    time_latent(times)


def latent_ways():
    """All heads read one row of 576 a position, whose first 512 values are the value too: heads are queries of one head."""
    def products(q, k):
        return torch.softmax(torch.matmul(q, k.mT) * 576 ** -0.5, -1) @ k[..., :512]

    def fused(backend):
        def call(q, k):
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, k[..., :512])
        return call

    ways = {"products": products, "compiled products": torch.compile(products)}
    ways.update({b.name: fused(b) for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                                            SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)})
    return ways


def time_latent(times):
    for positions in sorted({int(n.split("/")[4]) for n in times if re.match(r"latent/[^/]+/d512/h64/\d+$", n)}):
        n_caches = max(1, -(-SEVERAL_CACHES // (positions * 576 * 2)))
        caches = [torch.randn((1, 1, positions, 576), device="cuda", dtype=torch.bfloat16) for _ in range(n_caches)]
        q = torch.randn((1, 1, 64, 576), device="cuda", dtype=torch.bfloat16)
        found = []
        for name, way in latent_ways().items():
            try:
                found.append((time_calls([lambda k=k, way=way: way(q, k) for k in caches * 2]), name))
                print(f"torch/bf16/latent/h64/{positions} {name} {found[-1][0]:.2f}", flush=True)
            except Exception:  # not every backend accepts every shape
                torch.cuda.synchronize()
        best = min(found)
        print(f"time torch/bf16/latent/h64/{positions} {best[0]:.2f} {best[1]}", flush=True)
        for name, microseconds in times.items():
            if re.match(rf"latent/[^/]+/d512/h64/{positions}$", name):
                print(f"ratio {name}/torch {best[0] / microseconds:.3f}")


def time_full_precision(times):
    """Many queries in float32, the precision of the library's sums."""
    for name in times:
        match = re.match(r"attend/f16/d(\d+)/g(\d+)/q(\d+)/(\d+)$", name)
        if match and int(match.group(3)) > 8:
            shape = [int(x) for x in match.groups()]
            best = best_time(*shape, torch.float32, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
            if best:
                print(f"time torch/f32/{name[11:]} {best[0]:.2f} {best[1]}")


if __name__ == "__main__":
    main()
