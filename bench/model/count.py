"""Counts the operations of a shader: sorts LLVM's code of one pipeline into classes and makes it count its blocks.

What Apple's compiler makes of a shader is not known here. LLVM's optimised code, from which it too starts, is the
nearest thing. Rules say what of it costs nothing on a GPU: conversions between registers' halves, moves, comparisons
that a selection or a branch takes in, constant offsets of addresses.
"""
import re
from collections import Counter

ASSIGNMENT = re.compile(r"^  (%[\w.]+) = (.*)$")
OPCODE = re.compile(r"^(?:tail |musttail |notail )?(\w+)")
CALL = re.compile(r"call\b[^@]*@([\w.]+)\(")
VALUE = re.compile(r"%[\w.]+|%\"[^\"]+\"")
CONSTANT_OPERAND = re.compile(r", (-?\d+)$")

CALLS = {
    "model_shuffle": "lookup shuffle", "model_quad_shuffle": "quad shuffle", "model_shuffle_xor": "shuffle",
    "model_multiply": "matrix product", "model_sum": "reduction", "model_max": "reduction", "model_any": "vote",
    "model_threadgroup_barrier": "barrier", "model_simdgroup_barrier": "barrier",
    "model_exp2": "exponential", "model_tanh": "exponential", "model_rint": "conversion", "model_sqrt": "square root",
    "model_store_atomic": "device access",
    "model_saturate": None,  # part of the operation before it
    "model_half": None, "model_address": None, "model_check_constants": None,
    "llvm.fma.f32": "multiply-add", "llvm.fabs.f32": None,
    "llvm.umin.i32": "selection", "llvm.umax.i32": "selection", "llvm.smin.i32": "selection",
    "llvm.smax.i32": "selection", "llvm.maxnum.f32": "selection", "llvm.minnum.f32": "selection",
    "llvm.fshl.i32": "rotation", "llvm.assume": None,
}
FREE = {"phi", "bitcast", "inttoptr", "ptrtoint", "trunc", "fneg", "insertelement", "extractelement", "extractvalue",
        "insertvalue", "freeze", "ret", "unreachable", "addrspacecast", "alloca", "shufflevector"}
FLOATS = {"fadd", "fsub", "fmul"}
INTEGERS = {"add", "sub", "and", "or", "xor"}
SHIFTS = {"shl", "lshr", "ashr"}
SPACES = {"1": "device", "2": "constant", "3": "threadgroup", "0": "private"}
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}


class Instruction:
    def __init__(self, line):
        match = ASSIGNMENT.match(line)
        self.name, self.text = (match.group(1), match.group(2)) if match else (None, line.strip())
        self.text = re.sub(r"(, !\S+ !?\S+)+$", "", re.sub(r", align \d+", "", self.text))
        self.opcode = OPCODE.match(self.text).group(1)
        self.line = line
        self.uses = []

    def operands(self):
        return VALUE.findall(self.text)

    def constant(self):
        match = CONSTANT_OPERAND.search(self.text)
        return int(match.group(1)) if match else None

    def wide(self):
        return re.match(r"\w+(?: nuw| nsw| exact)* i64", self.text) is not None


class Function:
    """A function of a .ll file as blocks of instructions."""

    def __init__(self, lines):
        self.blocks, self.defined = [[]], {}
        for line in lines:
            text = line.split(";")[0].rstrip()
            if re.match(r"^[\w.$-]+:", text):
                self.blocks.append([])
            elif text.startswith("  ") and not text.startswith("   ") and text != "  ]":  # the end of a switch
                self.blocks[-1].append(Instruction(text))
            elif text.strip() and not text.strip().startswith(("i", "]")):
                raise SystemExit(f"not understood: {line}")
        if not self.blocks[0]:
            self.blocks.pop(0)
        for instruction in self.all():
            if instruction.name:
                self.defined[instruction.name] = instruction
        for instruction in self.all():
            for operand in instruction.operands():
                if operand in self.defined:
                    self.defined[operand].uses.append(instruction)

    def all(self):
        return (i for block in self.blocks for i in block)


def size_of(kind):
    vector = re.match(r"<(\d+) x (\w+)>", kind)
    return int(vector.group(1)) * SIZES[vector.group(2)] if vector else SIZES[kind]


def access(instruction):
    """(space, bytes, pointer) of a load or store."""
    match = re.match(r"(?:load|store)(?: volatile)? (<[^>]*>|\w+)[^,]*, .*?\baddrspace\((\d)\)\* (\S+)$",
                     instruction.text)
    if not match:
        match = re.match(r"(?:load|store) (<[^>]*>|\w+|%\S+)[^,]*, (.)", instruction.text)
        return "private", 0, None
    return SPACES[match.group(2)], size_of(match.group(1)), match.group(3)


def single_use(instruction, opcodes):
    return len(instruction.uses) == 1 and instruction.uses[0].opcode in opcodes


def is_threadgroup_index(i):
    """LLVM widens indices to 64 bits; addresses of threadgroup memory are shorter."""
    return bool(i.uses) and all(u.opcode == "getelementptr" and "addrspace(3)" in u.text for u in i.uses)


def integer_class(i, function):
    only_addresses = bool(i.uses) and all(u.opcode == "getelementptr" for u in i.uses)
    if i.opcode in ("or", "add") and i.constant() is not None and only_addresses:
        return {}  # a constant offset
    if i.wide() and is_threadgroup_index(i):
        return {"integer": 1}
    if i.wide():
        return {"64-bit sum": 1} if i.opcode in ("add", "sub") else {"integer": 2}
    operands = [function.defined.get(o) for o in i.operands()]
    if i.opcode == "and" and i.constant() is not None and len(operands) == 1 and operands[0] is not None:
        if i.constant() in (0xffff,):
            return {}  # half of a register
        shifted = operands[0]
        mask = i.constant()
        if shifted.opcode == "lshr" and mask & (mask + 1) == 0 and single_use(shifted, {"and"}):
            return {}  # a bit field is taken by one operation: the shift's
    if i.opcode in ("add", "sub") and any(o is not None and o.opcode == "mul" and not o.wide() and
                                          single_use(o, {"add"}) for o in operands):
        return {}  # multiply and add
    return {"integer": 1}


def shift_class(i):
    if i.wide():
        return {"shift": 2}
    if i.opcode == "shl" and i.constant() is not None and i.constant() <= 4 and single_use(i, {"add", "sub"}):
        return {}  # part of the sum
    if i.opcode == "lshr" and i.constant() == 16 and i.uses and all(u.opcode == "trunc" for u in i.uses):
        return {}  # the upper half of a register
    return {"shift": 1}


def variable_indices(i):
    return [v for v in re.findall(r"i(?:64|32) (%[\w.]+|-?\d+)", i.text.split("*", 1)[1]) if v.startswith("%")]


def address_class(i, function):
    """An access takes a base and an index of 32 bits or a constant: one of these costs nothing.

    See device_load and threadgroup_load in dougallj/applegpu, docs.html."""
    variable = [function.defined.get(v) for v in variable_indices(i)]
    if not variable:
        return {}
    if "addrspace(1)" in i.text:
        narrow = all(v is not None and v.opcode in ("zext", "sext") for v in variable)
        return {} if narrow else {"64-bit sum": 1}
    used = [u for use in i.uses for u in (use.uses if use.opcode == "bitcast" else [use])]
    return {} if all(u.opcode in ("load", "store") for u in used) else {"integer": 1}


def memory_class(i, function):
    space, size, pointer = access(i)
    if space == "constant":
        address = function.defined.get(pointer)
        uniform = address is None or address.opcode != "getelementptr" or not variable_indices(address)
        return {} if uniform else {"constant look-up": 1}  # arguments are in registers from the start
    return {f"{space} access": 1, f"{space} bytes": size}


def classify(i, function):
    """{class: number} of one instruction."""
    if i.opcode == "call" or " call " in " " + i.text:
        name = CALL.search(i.text)
        if not name or name.group(1).startswith(("llvm.lifetime", "llvm.experimental.noalias")):
            return {}
        if name.group(1) not in CALLS:
            raise SystemExit(f"no class for the call {name.group(1)}")
        kind = CALLS[name.group(1)]
        if kind == "lookup shuffle" and re.search(r"i32 noundef \d+, i8\*", i.text):
            kind = "shuffle"  # a broadcast
        return {kind: 1} if kind else {}
    if i.opcode in FREE:
        return {}
    if i.opcode in FLOATS:
        return {"float": 1}
    if i.opcode == "fdiv":
        return {"division": 1}
    if i.opcode in ("udiv", "urem", "sdiv", "srem"):
        return {"integer division": 2 if i.wide() else 1}
    if i.opcode in INTEGERS:
        return integer_class(i, function)
    if i.opcode in SHIFTS:
        return shift_class(i)
    if i.opcode == "mul":
        return {"64-bit product": 1} if i.wide() else {"product": 1}
    if i.opcode in ("icmp", "fcmp"):
        return {} if all(u.opcode in ("select", "br") for u in i.uses) else {"selection": 1}
    if i.opcode == "select":
        return {"selection": 1}
    if i.opcode in ("sitofp", "uitofp", "fptosi", "fptoui"):
        return {"conversion": 1}
    if i.opcode == "zext":
        return {}
    if i.opcode == "sext":
        return {"shift": 1} if re.match(r"sext i(8|1) ", i.text) else {"integer": 1}
    if i.opcode in ("br", "switch"):
        return {"branch": 1} if "label" in i.text and "," in i.text else {}
    if i.opcode == "getelementptr":
        return address_class(i, function)
    if i.opcode in ("load", "store"):
        return memory_class(i, function)
    raise SystemExit(f"no class for {i.line}")


def touched(i, place):
    """The call that reports a threadgroup access or a device load to the machine."""
    space, size, pointer = access(i)
    if space != "threadgroup" and (space != "device" or i.opcode == "store"):
        return []
    kind = re.search(r", ((?:\S+|<[^>]*>) addrspace\([13]\)\*) \S+$", i.text).group(1)
    is_device = int(space == "device")
    return [f"  %touch{place} = ptrtoint {kind} {pointer} to i64",
            f"  call void @model_touch(i1 zeroext {is_device}, i32 {place}, i32 {size}, i64 %touch{place})"]


def instrument(text, kernel):
    """(classes of each block, .ll text whose blocks report each visit) of the launcher of a kernel."""
    lines = text.split("\n")
    start = next(i for i, l in enumerate(lines) if l.startswith("define") and f"simt_run_{kernel}" in l)
    end = next(i for i in range(start, len(lines)) if lines[i] == "}")
    body = Function(lines[start + 1:end])
    classes, out, block, place, entered = [], lines[:start + 1], -1, 0, True
    for instructions in body.blocks:
        counts = Counter()
        for i in instructions:
            counts.update(classify(i, body))
        classes.append(counts)
    for line in lines[start + 1:end]:
        code = line.split(";")[0].rstrip()
        is_label = re.match(r"^[\w.$-]+:", code)
        if is_label:
            entered = True
        elif entered and code and " phi " not in code:
            block, entered = block + 1, False
            out.append(f"  call void @model_visit(i32 {block})")
        if re.match(r"^  (%\S+ = load|store) ", code):
            out += touched(Instruction(code), place)
            place += 1
        out.append(line)
    out += lines[end:] + ["declare void @model_visit(i32)", "declare void @model_touch(i1 zeroext, i32, i32, i64)"]
    return classes, "\n".join(out)


def total(classes, output):
    """Operations of a run, each counted once a simdgroup, from the output of the counted program."""
    counts = Counter()
    for line in output.split("\n"):
        words = line.split()
        if words and words[0] == "block":
            for name, n in classes[int(words[1])].items():
                counts[name] += n * int(words[2])
        if words and words[0] == "banks":
            counts[f"cycles of {words[1]} banks"] = float(words[2])
        if words and words[0] in ("loaded", "lines"):
            counts[f"{words[0]} bytes"] = float(words[1])
    return counts
