"""LLVM 14's optimised IR of one kernel as AIR: the older forms that every Metal runtime reads, AIR's conventions for
function constants and attributes, and a check that nothing else is left. Works on LLVM's text, where every value has a
name (the pass instnamer).
"""
import re

from metadata import SCALARS, Metadata, Refusal

LAYOUT = ("e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-f32:32:32-f64:64:64-v16:16:16-v24:32:32-v32:32:32-"
          "v48:64:64-v64:64:64-v96:128:128-v128:128:128-v192:256:256-v256:256:256-v512:512:512-v1024:1024:1024-n8:16:32")
OPCODES = set("""ret br switch add fadd sub fsub mul fmul udiv sdiv fdiv urem srem shl lshr ashr and or xor alloca load
store getelementptr trunc zext sext fpext fptrunc bitcast icmp fcmp phi select call insertelement extractelement
shufflevector insertvalue extractvalue unreachable""".split())
INTEGERS = {"i1", "i8", "i16", "i32", "i64"}
# Kinds of functions, each an attribute group of the module.
PLAIN, TOGETHER, CONST, KERNEL = range(4)
GROUPS = ("nounwind", "convergent nounwind", "nounwind readnone",
          'convergent nounwind "frame-pointer"="all" "min-legal-vector-width"="0" "no-builtins" "no-trapping-math"="true" '
          '"stack-protector-buffer-size"="8"')
# Every function that a module may call: result, parameters, kind.
CALLS = {
    "air.wg.barrier": ("void", "i32, i32", TOGETHER), "air.simdgroup.barrier": ("void", "i32, i32", TOGETHER),
    "air.simd_any": ("i1", "i1", TOGETHER), "air.simd_sum.f32": ("float", "float", TOGETHER),
    "air.simd_max.f32": ("float", "float", TOGETHER), "air.simd_shuffle.f32": ("float", "float, i16", TOGETHER),
    "air.simd_shuffle.u.i32": ("i32", "i32, i16", TOGETHER), "air.simd_shuffle_xor.f32": ("float", "float, i16", TOGETHER),
    "air.simd_shuffle_xor.u.i32": ("i32", "i32, i16", TOGETHER),
    "air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64f32.v64f32.v64f32":
        ("<64 x float>", "<64 x float>, <64 x float>, <64 x float>", TOGETHER),
    "air.atomic.global.store.i32": ("void", "i32 addrspace(1)*, i32, i32, i32, i1", PLAIN),
    "air.atomic.local.add.u.i32": ("i32", "i32 addrspace(3)*, i32, i32, i32, i1", PLAIN),
    "llvm.lifetime.start.p0i8": ("void", "i64, i8*", PLAIN), "llvm.lifetime.end.p0i8": ("void", "i64, i8*", PLAIN),
    "llvm.memset.p0i8.i64": ("void", "i8*, i8, i64, i1", PLAIN), "air.fma.f32": ("float", "float, float, float", CONST),
    **{f"air.{name}.f32": ("float", "float", CONST) for name in ("rint", "sqrt", "tanh", "fast_exp2")},
    **{f"air.{name}.f32": ("float", "float, float", CONST) for name in ("fmax", "fmin")},
    **{f"air.convert.f.f32.{sign}.i{bits}": ("float", f"i{bits}", CONST) for sign in "su" for bits in (8, 16, 32)},
    **{f"air.convert.{sign}.i{bits}.f.f32": (f"i{bits}", "float", CONST) for sign in "su" for bits in (8, 16, 32)}}
# Conversions are calls: the start of the name, with the type from before and after.
CONVERSIONS = {"uitofp": "f.{1}.u.{0}", "sitofp": "f.{1}.s.{0}", "fptoui": "u.{1}.f.{0}", "fptosi": "s.{1}.f.{0}"}
COMPARISONS = {"umin": "ult", "umax": "ugt", "smin": "slt", "smax": "sgt", "usub.sat": "ugt"}
KEPT = ("range", "llvm.loop", "dbg")  # metadata of instructions; dbg for check alone
HINT = (r" (?:noundef|nonnull|readnone|writeonly|signext|zeroext|immarg|noalias|align \d+|dereferenceable_or_null\(\d+\)%s)"
        r"(?=[ ,)])")
# Apple's modules have the second kind, too, but of a kernel's own parameters alone.
HINTS_OF_PARAMETERS, HINTS = re.compile(HINT % ""), re.compile(HINT % r"|nocapture|readonly|dereferenceable\(\d+\)")


def split(text):
    """Splits at commas outside of all brackets and strings."""
    depth, parts, last, in_string = 0, [], 0, False
    for i, c in enumerate(text):
        in_string ^= c == '"'
        depth += not in_string and (c in "(<{[") - (c in ")>}]")
        if c == "," and depth == 0 and not in_string:
            parts.append(text[last:i].strip())
            last = i + 1
    return [p for p in parts + [text[last:].strip()] if p]


def type_of(operand):
    """The type of `TYPE VALUE`; the value of a vector may be a list."""
    vector = re.match(r"(<\d+ x \w+>) [<%uz]", operand)
    return (vector or re.match(r"(.*\S)\s+\S+$", operand)).group(1)


class Kernel:
    """One kernel's module: lines of text, and what of it the container and the metadata name."""

    def __init__(self, name, text):
        self.name = name
        self.header = re.search(rf"(?m)^define .*@{name}\((.*)\).*{{$", text).group(1)
        self.header = split(HINTS_OF_PARAMETERS.sub("", f" {self.header})")[:-1])
        body = re.search(rf"(?ms)^define .*@{name}\(.*?{{$\n(.*?)^}}$", text).group(1)
        body = re.sub(r"\n\s+(i\d+ [^\n]+)(?=\n)|\n  \]", lambda m: " " + (m.group(1) or "]"), body)  # switch: one line
        self.body = [re.sub(r" +; preds = .*", "", line) for line in body.splitlines() if line]
        self.types = re.findall(r"(?m)^(%.* = type .*)$", text)
        self.globals = [re.sub(r"\b(dso_local|local_unnamed_addr) ", "", g) for g in re.findall(r"(?m)^(@.*)$", text)]
        self.others = [d for d in re.findall(r"(?m)^define .*@(\S+?)\(", text) if d != name]
        self.nodes = dict(re.findall(r"(?m)^!(\d+) = (.*)$", text))
        self.forget_progress()
        self.place = self.line_of(re.search(rf"(?m)^define .*@{name}\(.*$", text).group(0))

    def forget_progress(self):
        """Loops without the promise that they end. It helps no loop of the shaders, and most have nothing else to say."""
        promise = next((n for n, node in self.nodes.items() if node == '!{!"llvm.loop.mustprogress"}'), "none")
        plain = {n for n, node in self.nodes.items() if node == f"distinct !{{!{n}, !{promise}}}"}
        self.body = [re.sub(r", !llvm\.loop !(\d+)", lambda m: "" if m.group(1) in plain else m.group(0), line)
                     for line in self.body]
        self.nodes = {n: re.sub(rf", !{promise}\b", "", node) for n, node in self.nodes.items() if n not in plain | {promise}}

    def lower(self):
        out, byte_steps = [], {}
        for line in self.body:
            match = re.match(r"  %(\S+) = getelementptr (?:inbounds )?i8, (i8 addrspace\(\d\)\*) %(\S+), i64 ([^,]+)", line)
            if match:
                byte_steps[match.group(1)] = match.groups()
        for line in self.body:
            if "@llvm.experimental.noalias.scope.decl(" in line: # its metadata is left out, too
                continue
            metadata = re.findall(r", (!(\S+) !\d+)", line)
            line = re.sub(r", !\S+ !\d+", "", line)
            tail = "".join(f", {node}" for node, kind in metadata if kind in KEPT)
            out += [new + (tail if i == n - 1 else "") for new, i, n in self.instruction(line, byte_steps)]
        self.body = out

    def instruction(self, line, byte_steps):
        """The lines that take the place of one, each with its number and how many they are."""
        line = re.sub(r"\bpoison\b", "undef", line)
        match = re.match(r"  %(\S+) = (\w+) (.*)", line)
        name, opcode, rest = match.groups() if match else ("", "", "")
        lines = [line]
        if opcode == "freeze":
            lines = [f"  %{name} = select i1 true, {rest}, {rest}"]
        elif opcode == "fneg":
            kind, value = rest.rsplit(" ", 1)
            lines = [f"  %{name} = fsub {kind} -0.000000e+00, {value}"]
        elif opcode in CONVERSIONS:
            of, value, to = re.fullmatch(r"(\S+) (\S+) to (\S+)", rest).groups()
            call = CONVERSIONS[opcode].format(*({"float": "f32"}.get(kind, kind) for kind in (of, to)))
            lines = [f"  %{name} = call {to} @air.convert.{call}({of} {value})"]
        elif name in byte_steps:
            lines = self.from_the_start(name, byte_steps)
        elif re.search(r"\bcall ", line):
            lines = self.call(name, re.sub(r"\b(?:tail |spir_func )|(?<=\)) #\d+", "", HINTS.sub("", line)))
        return [(new, i, len(lines)) for i, new in enumerate(lines)]

    @staticmethod
    def from_the_start(name, steps):
        """One step in bytes in place of several: a byte stored behind two may get lost in Apple's back end."""
        _, kind, base, offset = steps[name]
        lines = []
        while base in steps:
            _, _, base, before = steps[base]
            lines.append(f"  %{name}.sum{len(lines)} = add i64 {before}, {offset}")
            offset = f"%{name}.sum{len(lines) - 1}"
        return lines + [f"  %{name} = getelementptr i8, {kind} %{base}, i64 {offset}"]

    @staticmethod
    def call(name, line):
        """By comparison: runtimes before macOS 14 do not know these functions of LLVM."""
        match = re.search(r"call (i\d+) @llvm\.([us](?:min|max)|usub\.sat)\.i\d+\(i\d+ (\S+), i\d+ (\S+)\)", line)
        if not match:
            return [line]
        kind, function, a, b = match.groups()
        test = f"  %{name}.test = icmp {COMPARISONS[function]} {kind} {a}, {b}"
        if function == "usub.sat":
            return [test, f"  %{name}.difference = sub {kind} {a}, {b}",
                    f"  %{name} = select i1 %{name}.test, {kind} %{name}.difference, {kind} 0"]
        return [test, f"  %{name} = select i1 %{name}.test, {kind} {a}, {kind} {b}"]

    def split_tables(self):
        """A table for each member of a constant struct that the kernel uses. Nothing changes where it uses the whole."""
        for line in list(self.globals):
            match = re.match(r"(@\S+) = (.*addrspace\(2\) constant) (%\S+) \{ (.*) \}, align (\d+)$", line)
            if not match:
                continue
            name, linkage, kind, values, align = match.groups()
            types = split(re.search(rf"^{re.escape(kind)} = type {{ (.*) }}$", "\n".join(self.types), re.M).group(1))
            member = re.compile(rf"{re.escape(kind)}, {re.escape(kind)} addrspace\(2\)\* {re.escape(name)}, i64 0, i32 (\d+)")
            body, used = "\n".join(self.body), set()

            def place(found):
                number = int(found.group(1))
                used.add(number)
                return f"{types[number]}, {types[number]} addrspace(2)* {name}.{number}, i64 0"

            body = member.sub(place, body)
            if re.search(rf"{re.escape(name)}(?![\w.])", body):
                continue
            self.body = body.split("\n")
            self.globals.remove(line)
            self.globals += [f"{name}.{n} = {linkage} {split(values)[n]}, align {align}" for n in sorted(used)]

    def set_constants(self, declared, source):
        """Function constants are globals that an initialiser copies from those that the runtime sets."""
        made, copies, self.constants, self.listed = [], [], [], []
        for kind, name, index in sorted(declared, key=lambda d: d[2]):
            match = next(filter(None, (re.match(rf"@{name} = external addrspace\(2\) constant (i\d+|float), align (\d+)$", g)
                                       for g in self.globals)), None)
            if not match:
                continue
            of, align = match.groups()
            own, given = f"_ZL{len(name)}{name}", f"_Z{len(name)}{name}.MTL_FC_INIT_{index}_{SCALARS[kind][2]}"
            self.globals.remove(match.group(0))
            self.body = [re.sub(rf"@{name}\b", f"@{own}", line) for line in self.body]
            made += [f"@{own} = internal unnamed_addr addrspace(2) global {of} undef, align {align}",
                     f"@{given} = internal unnamed_addr addrspace(2) externally_initialized constant {of} undef, "
                     f'section "air.fc_initializer", align {align}']
            copies += [f"  %c{index} = load {of}, {of} addrspace(2)* @{given}, align {align}",
                       f"  store {of} %c{index}, {of} addrspace(2)* @{own}, align {align}"]
            self.constants.append((of, given, kind, name, index))
            self.listed.append((name, SCALARS[kind][3], index))
        if made:
            setter = f"@_GLOBAL__sub_I_{source}"
            made.append(f"@llvm.global_ctors = appending global [1 x {{ i32, void ()*, i8* }}] [{{ i32, void ()*, i8* }} "
                        f"{{ i32 65535, void ()* {setter}, i8* null }}]")
            copies = [f'define internal void {setter}() #{PLAIN} section "air.static_init" {{', *copies, "  ret void", "}"]
        self.made, self.setter = made, copies

    def problems(self):
        """[(what, line)] that this builder was not made for."""
        for other in self.others:
            yield f"a call that is not inlined: {other}", "@" + other
        for line in self.globals:
            if not re.match(r"@\S+ = internal unnamed_addr addrspace\(2\) constant ", line):
                yield "a global: " + line[:80], line.split(" ", 1)[0]
        for line in filter(lambda text: text.startswith("  "), self.body):
            opcode = re.match(r"  (?:%\S+ = )?(\w+)", line).group(1)
            call = re.search(r"call ([^@]+) @?(\S+?)\((.*?)\)(?:,|$)", line)
            if opcode not in OPCODES:
                yield f"instruction {opcode}", line
            elif opcode == "call":
                signature = (call.group(1), ", ".join(type_of(p) for p in split(call.group(3)))) if call else None
                if signature != CALLS.get(call.group(2) if call else "", ())[:2]:
                    yield f"call of {call.group(2) if call else 'a pointer'}", line
            for kind in set(re.findall(r"(?<![%@\w.])i\d+\b", line)) - INTEGERS:
                yield f"integer type {kind}", line
            vector = re.search(r"(?:load|store) <(\d+) x (?:float|i32)>.*align (\d+)", line)
            if vector and int(vector.group(2)) < 4 * int(vector.group(1)):
                yield "alignment of a vector", line

    def line_of(self, text):
        """`FILE:LINE: ` of an instruction or function, if the shaders were compiled with line numbers."""
        used = next((line for line in self.body if text[0] == "@" and text in line and "!dbg" in line), text)
        match = re.search(r"!dbg !(\d+)", used)
        if not match:
            return ""
        node = self.nodes[match.group(1)]
        scope = node if "file: " in node else self.nodes[re.search(r"scope: !(\d+)", node).group(1)]
        file = self.nodes[re.search(r"file: !(\d+)", scope).group(1)]
        return re.search(r'filename: "(.*?)"', file).group(1) + ":" + re.search(r"line: (\d+)", node).group(1) + ": "

    def check(self):
        found = sorted({self.line_of(line) + what for what, line in self.problems()})
        if found:
            raise Refusal("\n".join(found[:20]))

    def numbered(self, body):
        """Parameters and body with numbers for names, which bitcode would keep."""
        made = (re.match(r"  %(\S+) = |(\S+):$", line) for line in body)
        names = [p.rsplit("%", 1)[1] for p in self.header] + [m.group(1) or m.group(2) for m in made if m]
        number = {name: str(i) for i, name in enumerate(names)}
        name = r'("[^"]*"|[-$\w.]+)'
        parts = [re.sub("%" + name, lambda m: "%" + number.get(m.group(1), m.group(1)), p) for p in self.header + body]
        parts = [re.sub("^" + name + ":$", lambda m: number[m.group(1)] + ":", p) for p in parts]
        return parts[:len(self.header)], parts[len(self.header):]

    def text(self, target, arguments, structs):
        """The module; names of LLVM's own functions are spelled llwm here, see build.py."""
        self.check()
        body = [re.sub(r", !dbg !\d+", "", line) for line in self.body]
        called = sorted(set(re.findall(r"call [^@]+@([\w.]+)\(", "\n".join(body))))
        kinds = {name: CALLS[name][2] for name in called}
        body = [re.sub(r"(call [^@]+@([\w.]+)\(.*?\))(?=,|$)", lambda m: f"{m.group(1)} #{kinds[m.group(2)]}", line)
                for line in body]
        header, body = self.numbered(body)
        metadata = Metadata(1 + max(map(int, self.nodes), default=-1))
        metadata.module(target)
        try:
            metadata.kernel(self.name, [type_of(HINTS.sub("", p)) for p in self.header], arguments, structs)
        except Refusal as refusal:
            raise Refusal(f"{self.place}{refusal}") from None
        metadata.constants(self.constants)
        parameters = (re.sub(r"\* (.*%)", r'* "air-buffer-no-alias" \1', p) for p in header)
        nodes = [f"!{n} = {node}" for n, node in self.nodes.items() if "!DI" not in node]
        lines = [f'source_filename = "{self.name}"', f'target datalayout = "{LAYOUT}"',
                 f'target triple = "{target.triple}"', *self.types, *self.globals, *self.made,
                 f"define void @{self.name}({', '.join(parameters)}) #{KERNEL} {{", *body, "}", *self.setter,
                 *(f"declare {CALLS[name][0]} @{name}({CALLS[name][1]}) #{kinds[name]}" for name in called),
                 *(f"attributes #{i} = {{ {group} }}" for i, group in enumerate(GROUPS)), *nodes, *metadata.lines]
        return "\n".join(lines).replace("@llvm.memset", "@llwm.memset").replace("@llvm.lifetime", "@llwm.lifetime") + "\n"
