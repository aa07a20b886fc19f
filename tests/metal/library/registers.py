"""Counts the registers of 32 bits that a lane needs at the heads of a kernel's loops, from the text of its optimised LLVM function.

Counted are values that are live there and differ between lanes: what comes from the lane's number, from shuffles and from loads
at such addresses. Addresses, which have 64 bits, and conditions are not; of a matrix of 8x8 a lane has two elements. A compiler for a GPU moves
loads and folds addresses, so this is what the code asks for, not what a GPU takes.
"""
import re

BITS = {"float": 32, "i32": 32, "half": 32, "i16": 32, "i8": 32}
UNIFORM_CALLS = re.compile(r"@air\.(simd_(sum|max|min|any|all)|simd_vote|atomic)")
LANE = r'i32 (\d+), !"air\.(?:thread_index_in_simdgroup|thread_index_in_threadgroup|thread_position_in_\w+)"'
NAME = re.compile(r'%(?:[\w.$-]+|"[^"]*")')


def registers_of(kind):
    """Of a value of this type in text."""
    vector = re.match(r"<(\d+) x (\S+)>", kind)
    if vector:
        elements = int(vector.group(1))
        return 2 if elements == 64 else elements * registers_of(vector.group(2))
    return 0 if kind.endswith("*") else BITS.get(kind.split(" ")[0].rstrip(","), 0) // 32


def type_of(line):
    """Of an instruction's result."""
    operation = line.split(" = ", 1)[1]
    kind = r"(<\d+ x \w+>|\S+?)"
    for pattern in (rf"(?:bitcast|zext|sext|trunc|fpext|fptrunc|[us]itofp|fpto[us]i|inttoptr|ptrtoint|addrspacecast) .* to (.*?)(?:,|$)",
                    rf"load (?:volatile )?{kind}, ", rf"phi (?:[a-z]+ )*{kind} \[", rf"select (?:[a-z]+ )*i1 \S+, {kind} ",
                    rf"(?:tail |musttail |notail )?call (?:[a-z_]+(?:\(\d+\))? )*{kind} @"):
        found = re.match(pattern, operation)
        if found:
            return found.group(1)
    if re.match(r"getelementptr|alloca", operation):
        return "i8*"
    if re.match(r"[if]cmp", operation):
        return "i1"
    found = re.match(r"extractelement <\d+ x (\w+)>", operation)
    if found:
        return found.group(1)
    found = re.match(r"shufflevector <\d+ x (\w+)>.* <(\d+) x i32> \S+", operation)
    if found:
        return f"<{found.group(2)} x {found.group(1)}>"
    found = re.match(rf"\w+ (?:(?:nuw|nsw|exact|fast|nnan|ninf|nsz|arcp|contract|afn|reassoc|inbounds) )*{kind} ", operation)
    return found.group(1) if found else ""


def blocks_of(body):
    """[name, lines] of each block, in order."""
    blocks = [["", []]]
    for line in re.sub(r"\[\n(.*?)\n\s*\]", lambda m: "[ " + m.group(1).replace("\n", " ") + " ]", body, flags=re.S).split("\n")[1:]:
        label = re.match(r'^([\w.$-]+|"[^"]*"):', line)
        if label:
            blocks.append(["%" + label.group(1), []])
        elif line.startswith("  "):
            blocks[-1][1].append(line.strip())
    return blocks


def differing(parameters, lines):
    """Names of the values that differ between lanes."""
    found, before = set(parameters), -1
    while len(found) != before:
        before = len(found)
        for line in lines:
            if " = " not in line or UNIFORM_CALLS.search(line):
                continue
            name, operands = line.split(" = ", 1)
            if "@air.simd_shuffle" in line or "simdgroup_matrix" in line or found & set(NAME.findall(operands)):
                found.add(name)
    return found


def live_at_loops(blocks):
    """The names that are live at the head of each loop, with what begins there."""
    order = {name: i for i, (name, _) in enumerate(blocks)}
    uses, defs, phis, edges, targets = {}, {}, {}, {}, {}
    for name, lines in blocks:
        uses[name], defs[name], phis[name] = set(), set(), {}
        targets[name] = [t for t in re.findall(r"label (%(?:[\w.$-]+|\"[^\"]*\"))", lines[-1])] if lines else []
        for line in lines:
            result, _, operands = line.partition(" = ") if re.match(r"%\S+ = ", line) else ("", "", line)
            if operands.startswith("phi "):
                phis[name][result] = re.findall(r"\[ ([^,]+), (%[^\s\]]+) \]", operands)
            else:
                uses[name] |= set(NAME.findall(operands)) - defs[name] - set(phis[name])
            if result:
                defs[name].add(result)
    for name, _ in blocks:
        edges[name] = [(b, value) for b, own in phis.items() if b in targets[name] for phi in own.values() for value, source in phi
                       if source == (name or "%entry") or (not name and source not in order)]
    live = {name: set() for name, _ in blocks}
    changed = True
    while changed:
        changed = False
        for name, _ in reversed(blocks):
            out = set().union(*(live[t] - set(phis[t]) for t in targets[name])) if targets[name] else set()
            out |= {value for _, value in edges[name] if value.startswith("%")}
            now = uses[name] | (out - defs[name]) | set(phis[name])
            if now != live[name]:
                live[name], changed = now, True
    heads = {t for name, _ in blocks for t in targets[name] if order.get(t, 0) <= order[name]}
    return [live[head] for head in heads]


def most_registers(module, body):
    """module: the text that has the kernel's parameters by number; body: the optimised function."""
    numbers = {int(n) for n in re.findall(LANE, module)}
    parameters = [NAME.findall(p)[-1] for p in re.split(r",(?![^()]*\))", re.search(r"\((.*)\)", body.split("\n", 1)[0]).group(1))]
    blocks = blocks_of(body)
    lines = [line for _, own in blocks for line in own]
    varied = differing({parameters[n] for n in numbers if n < len(parameters)}, lines)
    sizes = {line.split(" = ", 1)[0]: registers_of(type_of(line)) for line in lines if re.match(r"%\S+ = ", line)}
    return max([sum(sizes.get(name, 0) for name in live & varied) for live in live_at_loops(blocks)] or [0])
