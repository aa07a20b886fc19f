#!/usr/bin/env python3
"""Times PyTorch's attention on the shapes of the benchmark: scaled_dot_product_attention in float16, and a latent cache in
bfloat16 by it or by two products, whichever is faster.

usage: torch_attention.py RESULTS

RESULTS is the output of bench. Prints `time torch/... microseconds` for the fastest way that accepts the shape, and for latent
caches `ratio NAME/torch VALUE`: PyTorch's time divided by the library's. The method is that of bench: a graph of several calls
over copies of the data that together exceed the L2, and medians.
"""
import re
import statistics
import sys

try:
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
except ImportError:
    print("skipped: no PyTorch")
    sys.exit(0)

N_KV_HEADS = 8
SEVERAL_CACHES = 400 << 20
REPLAYS = 9
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


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


def time_calls(way, copies):
    calls = copies * -(-8 // len(copies))
    for copy in calls[:2]:
        way(*copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in calls:
            way(*copy)
    return replay(graph) / len(calls)


def print_fastest(name, ways, shapes, dtype):
    """The time of the fastest of {name: way} over copies of tensors of these shapes, or None if none accepts them."""
    size = sum(torch.Size(shape).numel() for shape in shapes) * torch.finfo(dtype).bits // 8
    copies = [[torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
              for _ in range(max(1, min(64, -(-SEVERAL_CACHES // size))))]
    found = []
    for label, way in ways.items():
        try:
            found.append((time_calls(way, copies), label))
        except Exception:  # not every backend accepts every shape
            torch.cuda.synchronize()
    print("time " * bool(found) + f"torch/{name}", "{:.2f} {}".format(*min(found)) if found else "no backend accepts it", flush=True)
    return min(found)[0] if found else None


def fused(backend, mask=None):
    def call(q, k, v):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return call


def time_attention(head_dim, group, n_queries, positions):
    ways = {backend.name: fused(backend) for backend in BACKENDS}
    if n_queries > 1:
        mask = causal_lower_right(n_queries, positions)
        ways.update({f"{backend.name} masked": fused(backend, mask) for backend in BACKENDS})
    cache = (1, N_KV_HEADS, positions, head_dim)
    print_fastest(f"f16/d{head_dim}/g{group}/q{n_queries}/{positions}", ways,
                  [(1, N_KV_HEADS * group, n_queries, head_dim), cache, cache], torch.float16)


def latent_ways():
    """All heads read one row of 576 a position, whose first 512 values are the value too: heads are queries of one head."""
    def products(q, k):
        return torch.softmax(torch.matmul(q, k.mT) * 576 ** -0.5, -1) @ k[..., :512]

    def of_backend(backend):
        return lambda q, k: fused(backend)(q, k, k[..., :512])

    return {"products": products, "compiled products": torch.compile(products),
            **{backend.name: of_backend(backend) for backend in [*BACKENDS, SDPBackend.MATH]}}


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        lines = [line.split() for line in f]
    times = {line[1]: float(line[2]) for line in lines if len(line) == 3 and line[0] == "time"}
    attend = re.compile(r"attend/[^/]+/d(\d+)/g(\d+)/q(\d+)/(\d+)$")
    latent = re.compile(r"latent/[^/]+/d512/h64/(\d+)$")
    print(f"torch {torch.__version__} {torch.cuda.get_device_name()}")
    for shape in sorted({tuple(int(x) for x in m.groups()) for m in map(attend.match, times) if m}):
        time_attention(*shape)
    for positions in sorted({int(m.group(1)) for m in map(latent.match, times) if m}):
        best = print_fastest(f"bf16/latent/h64/{positions}", latent_ways(), [(1, 1, 64, 576), (1, 1, positions, 576)],
                             torch.bfloat16)
        for name, microseconds in times.items():
            if best and re.fullmatch(rf"latent/[^/]+/d512/h64/{positions}", name):
                print(f"ratio {name}/torch {best / microseconds:.3f}")


if __name__ == "__main__":
    main()
