"""What a module of AIR says of its kernel, compared with the shader, and what it may hold at all.

The tables restate what is known of Apple's modules on purpose: the builder must not be checked by itself.
"""
import re

from reader import expect

LAYOUT = ("e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-f32:32:32-f64:64:64-v16:16:16-v24:32:32-v32:32:32-"
          "v48:64:64-v64:64:64-v96:128:128-v128:128:128-v192:256:256-v256:256:256-v512:512:512-v1024:1024:1024-n8:16:32")
SPACES = {"device": 1, "constant": 2, "threadgroup": 3}
MANGLED = {"float": "f", "int": "i", "uint": "j", "ushort": "t", "uchar": "h", "bool": "b"}
# Functions as Apple's own modules declare them, in those that metallib/README.md names.
SEEN = """
void air.wg.barrier(i32, i32)
void air.simdgroup.barrier(i32, i32)
float air.simd_shuffle_xor.f32(float, i16)
float air.simd_sum.f32(float)
float air.simd_max.f32(float)
float air.fma.f32(float, float, float)
float air.fmax.f32(float, float)
float air.fmin.f32(float, float)
float air.sqrt.f32(float)
float air.tanh.f32(float)
float air.fast_exp2.f32(float)
float air.convert.f.f32.s.i8(i8)
float air.convert.f.f32.u.i8(i8)
float air.convert.f.f32.u.i16(i16)
float air.convert.f.f32.s.i32(i32)
float air.convert.f.f32.u.i32(i32)
i32 air.convert.s.i32.f.f32(float)
i32 air.convert.u.i32.f.f32(float)
<64 x float> air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64f32.v64f32.v64f32(<64 x float>, <64 x float>, <64 x float>)
void air.atomic.global.store.i32(i32 addrspace(1)*, i32, i32, i32, i1)
i32 air.atomic.local.add.u.i32(i32 addrspace(3)*, i32, i32, i32, i1)
void llvm.lifetime.start.p0i8(i64, i8*)
void llvm.lifetime.end.p0i8(i64, i8*)
void llvm.memset.p0i8.i64(i8*, i8, i64, i1)
"""
# In published text only, as half functions, or under Apple's names for other widths.
READ_OF = """
i1 air.simd_any(i1)
i32 air.simd_shuffle_xor.u.i32(i32, i16)
float air.simd_shuffle.f32(float, i16)
i32 air.simd_shuffle.u.i32(i32, i16)
float air.rint.f32(float)
"""
KNOWN = {line.split("(")[0].split()[-1]: line for line in (SEEN + READ_OF).split("\n") if line}
TOGETHER = re.compile(r"air\.(?:wg\.barrier|simdgroup\.barrier|simd_[\w.]+|simdgroup_matrix_[\w.]+)")
# Attributes that readers before macOS 14 know: of functions, and of a kernel's parameters.
WORDS = {"nounwind", "convergent", "readnone"}
PARAMETER_WORDS = re.compile(r"nocapture|readonly|dereferenceable\(\d+\)")


def arguments(text):
    """Splits at commas outside of all brackets."""
    depth, last, parts = 0, 0, []
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and not depth:
            parts.append(text[last:i].strip())
            last = i + 1
    return [p for p in parts + [text[last:].strip()] if p]


class Module:
    def __init__(self, name, text):
        self.name, self.text = name, text
        self.nodes = dict(re.findall(r"(?m)^!(\d+) = (?:distinct )?!\{(.*)\}$", text))
        self.lists = dict(re.findall(r"(?m)^!([a-z][\w.]+) = !\{(.*)\}$", text))
        self.groups = dict(re.findall(r"(?m)^attributes #(\d+) = \{ (.*) \}$", text))
        define = re.search(rf"(?m)^define void @{name}\((.*)\)(?: local_unnamed_addr)? #(\d+) \{{$", text)
        self.expect(define, "no kernel of this name")
        self.parameters, self.group = arguments(define.group(1)), define.group(2)
        self.arguments = self.read_arguments()

    def expect(self, true, what):
        expect(true, f"{self.name}: {what}")

    def listed(self, name):
        """The contents of the nodes of a named list."""
        return [self.nodes[n] for n in re.findall(r"!(\d+)", self.lists.get(name, ""))]

    def read_arguments(self):
        """[{key: value}] of the kernel's metadata: its number, what it is, and pairs."""
        kernels = self.listed("air.kernel")
        self.expect(len(kernels) == 1 and f"@{self.name}, " in kernels[0], "air.kernel names another function")
        found = []
        for i, n in enumerate(re.findall(r"!(\d+)", self.nodes[kernels[0].rsplit("!", 1)[1]])):
            items = [re.sub(r'^!"(.*)"$|^i\d+ ', lambda m: m.group(1) or "", item) for item in arguments(self.nodes[n])]
            self.expect(items[0] == str(i), f"argument {i} is number {items[0]}")
            fact = {"is": items[1]}
            for key in ("location_index", "address_space", "arg_type_size", "arg_type_align_size", "arg_type_name",
                        "arg_name", "buffer_size", "struct_type_info"):
                if "air." + key in items:
                    fact[key] = items[items.index("air." + key) + 1]
            fact["access"] = next((item for item in items if item in ("air.read", "air.read_write")), "")
            found.append(fact)
        self.expect(len(found) == len(self.parameters), "not one node an argument")
        return found

    def check(self, shader, constants, library, triple):
        """shader: the kernel's arguments as msl.py reads them. constants: the container's."""
        self.expect(not re.search(r'(?m)^(?![@!;]).*\bptr\b', self.text), "opaque pointer")
        self.expect(f'target datalayout = "{LAYOUT}"' in self.text, "data layout")
        self.expect(f'target triple = "{triple}"' in self.text, f"triple, not {triple}")
        versions = ["i32 %d, i32 %d, i32 0" % library.air, '!"Metal", i32 %d, i32 %d, i32 0' % library.metal]
        self.expect([self.listed(n)[0] for n in ("air.version", "air.language_version")] == versions, "versions")
        self.expect('!"air.compile.fast_math_disable"' in self.listed("air.compile_options"), "fast math")
        self.check_arguments(shader)
        self.check_constants(constants)
        self.check_calls()
        self.check_rest()

    def check_arguments(self, shader):
        self.expect(len(shader) == len(self.arguments), "another number of arguments than the shader's")
        for (kind, name, ((attribute, index),)), fact, parameter in zip(shader, self.arguments, self.parameters):
            place = f"argument {name}: "
            self.expect(fact["arg_name"] == name, f"{place}named {fact['arg_name']}")
            if attribute not in ("buffer", "threadgroup"):
                self.expect(fact["is"] == "air." + attribute, f"{place}{fact['is']}, not {attribute}")
                self.expect(fact["arg_type_name"] == kind, f"{place}type {fact['arg_type_name']}")
                continue
            space = SPACES[kind.split()[0]]
            self.expect(fact["is"] == "air.buffer", f"{place}{fact['is']}, not a buffer")
            self.expect(f"addrspace({space})*" in parameter, f"{place}address space of {parameter.split('*')[0]}*, not {space}")
            self.expect(fact["address_space"] == str(space), f"{place}address space {fact['address_space']} in metadata")
            self.expect(fact["location_index"] == index, f"{place}index {fact['location_index']}, not {index}")
            constant = space == 2 or " const " in kind
            self.expect(fact["access"] == ("air.read" if constant else "air.read_write"), f"{place}{fact['access']}")
            words = parameter.split("*", 1)[1].split()[:-1]
            self.expect('"air-buffer-no-alias"' in words, f"{place}without air-buffer-no-alias")
            words = {word for word in words if word != '"air-buffer-no-alias"' and not PARAMETER_WORDS.fullmatch(word)}
            self.expect(not words, f"{place}attributes {sorted(words)}")
            self.expect(("buffer_size" in fact) == kind.endswith("&"), f"{place}buffer_size")
            self.expect(("struct_type_info" in fact) == ("%struct" in parameter or "%\"struct" in parameter), f"{place}struct")

    def check_constants(self, constants):
        """The container's list, the metadata's, and the globals agree."""
        found = []
        for item in self.listed("air.function_constants"):
            symbol, kind, name, index, _ = arguments(item)
            found.append((name[2:-1], kind[2:-1], int(index.split()[1])))
            name, kind, index = found[-1]
            mangled = f"@_Z{len(name)}{name}.MTL_FC_INIT_{index}_{MANGLED[kind]}"
            self.expect(symbol.endswith(mangled), f"function constant {name}: {symbol}")
            self.expect(re.search(rf"(?m)^{re.escape(mangled)} = internal unnamed_addr addrspace\(2\) externally_initialized "
                                  r'constant \S+ undef, section "air.fc_initializer"', self.text), f"global of {name}")
        self.expect(found == constants, f"function constants {found}, in the container {constants}")

    def check_calls(self):
        kinds = {}
        for result, name, parameters, group in re.findall(r"(?m)^declare (.+?) @([\w.]+)\((.*)\)(?: #(\d+))?$", self.text):
            if name.startswith("llvm."):  # LLVM gives its own functions attributes when it reads them
                parameters, group = re.sub(r" (?:immarg|nocapture|writeonly)\b", "", parameters), None
            line = f"{result} {name}({parameters})"
            self.expect(name in KNOWN, f"unknown function {name}")
            self.expect(line == KNOWN[name], f"signature {line}, not {KNOWN[name]}")
            kinds[name] = set(self.groups.get(group, "").split())
            self.expect(("convergent" in kinds[name]) == bool(TOGETHER.fullmatch(name)), f"convergent of {name}")
        for line in re.findall(r"(?m)^.*\bcall .*$", self.text):
            name, group = re.search(r"@([\w.]+)\(", line), re.search(r"\) #(\d+)", line)
            self.expect(name and name.group(1) in kinds, f"call {line.strip()}")
            words = set(self.groups[group.group(1)].split()) if group else set()
            self.expect(name.group(1).startswith("llvm.") or words == kinds[name.group(1)], f"convergent of a call of {name.group(1)}")
        self.expect("convergent" in self.groups[self.group].split(), "kernel without convergent")

    def check_rest(self):
        body = re.sub(r'(?m)^[@!;].*$|^(?:attributes|declare .*@llvm\.).*$|"[^"]*"', "", self.text)
        used = set(re.findall(r"\) #(\d+)", re.sub(r"(?m)^.*@llvm\..*$", "", self.text)))
        for group in (self.groups[n] for n in used):
            words = set(re.sub(r'"[^"]*"(="[^"]*")?', "", group).split())
            self.expect(words <= WORDS, f"attributes {sorted(words - WORDS)}")
        for word in ("freeze", "fneg", "poison", "addrspacecast", "fast", "noundef", "invoke", "fptosi", "sitofp"):
            self.expect(not re.search(rf"\b{word}\b", body), f"the word {word}")
        kinds = set(re.findall(r"(?<![%@\w.])i\d+\b", body)) - {"i1", "i8", "i16", "i32", "i64"}
        self.expect(not kinds, f"integer types {sorted(kinds)}")
