"""The metadata of an AIR module: versions, the kernel's arguments, function constants. LLVM 14's text."""
import re

# Type: size, alignment, kind in mangled names, MTLDataType.
SCALARS = {"float": (4, 4, "f", 3), "int": (4, 4, "i", 29), "uint": (4, 4, "j", 33), "ushort": (2, 2, "t", 41),
           "uchar": (1, 1, "h", 49), "bool": (1, 1, "b", 53), "uint2": (8, 8, None, 34)}
TYPES = {"int32_t": "int", "uint32_t": "uint", "uint8_t": "uchar", "atomic_uint": "metal::_atomic"}
SPACES = {"device": 1, "constant": 2, "threadgroup": 3}
POSITIONS = {"threadgroup_position_in_grid", "thread_index_in_threadgroup", "thread_index_in_simdgroup",
             "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"}
LIMITS = {"device_buffers": 31, "constant_buffers": 31, "threadgroup_buffers": 31, "textures": 128,
          "read_write_textures": 8, "samplers": 16}


class Refusal(Exception):
    """The shaders have something that the builder was not made for."""


def layouts(dump):
    """{struct: (size, alignment, [(offset, type, number of elements or 0, field)])} of clang's -fdump-record-layouts."""
    found = {}
    for record in dump.split("*** Dumping AST Record Layout")[1:]:
        name = re.match(r"\s*0 \| (?:struct |class )?([\w:]+)", record)
        total = re.search(r"\[sizeof=(\d+),.*?\balign=(\d+)", record, re.S)
        if not name or not total:
            continue
        fields = []
        for offset, kind, shape, field in re.findall(r"(?m)^ *(\d+) \|   (?:struct )?([\w:]+)((?:\[\d+\])*) (\w+)$", record):
            count = 1
            for n in re.findall(r"\d+", shape):
                count *= int(n)
            fields.append((int(offset), TYPES.get(kind, kind), count if shape else 0, field))
        found[name.group(1)] = (int(total.group(1)), int(total.group(2)), fields)
    return found


class Metadata:
    """Nodes are numbered from `first` on; equal ones are made once."""

    def __init__(self, first):
        self.lines, self.first, self.known = [], first, {}

    def node(self, *items):
        content = ", ".join(items)
        if content not in self.known:
            self.known[content] = f"!{self.first + len(self.known)}"
            self.lines.append(f"{self.known[content]} = !{{{content}}}")
        return self.known[content]

    def named(self, name, nodes):
        self.lines.append(f"!{name} = !{{{', '.join(nodes)}}}")

    def module(self, target):
        # Flags are errors (1), warnings (2) or the largest (7) when modules are linked.
        flags = [f'i32 2, !"SDK Version", [2 x i32] [i32 {target.sdk[0]}, i32 {target.sdk[1]}]',
                 'i32 1, !"wchar_size", i32 4']
        flags += ['i32 7, !"frame-pointer", i32 2'] if target.frame_pointer else []
        flags += [f'i32 7, !"air.max_{what}", i32 {number}' for what, number in LIMITS.items()]
        options = ("denorms_disable", "fast_math_disable", "framebuffer_fetch_enable")
        self.named("llvm.module.flags", [self.node(f) for f in flags])
        self.named("llvm.ident", [self.node('!"tqkv metallib/air"')])
        self.named("air.version", [self.node(f"i32 {target.air[0]}, i32 {target.air[1]}, i32 0")])
        self.named("air.language_version", [self.node(f'!"Metal", i32 {target.metal[0]}, i32 {target.metal[1]}, i32 0')])
        self.named("air.compile_options", [self.node(f'!"air.compile.{option}"') for option in options])

    def struct(self, name, structs):
        """The node of a struct's fields: each one's offset, size of an element, elements, type, name."""
        items = []
        for offset, kind, count, field in structs[name][2]:
            if kind in structs:
                items += ['!"air.struct_type_info"', self.struct(kind, structs)]
                size = structs[kind][0]
            elif kind in SCALARS:
                size = SCALARS[kind][0]
            else:
                raise Refusal(f"{name}.{field}: a field of type {kind}")
            items += [f"i32 {offset}", f"i32 {size}", f"i32 {count}", f'!"{kind}"', f'!"{field}"']
        return self.node(*items)

    def argument(self, number, argument, structs):
        """argument: (type, name, [(attribute, index)]) of the shader."""
        kind, name, ((attribute, index),) = argument
        if attribute in POSITIONS:
            return self.node(f'i32 {number}', f'!"air.{attribute}"', '!"air.arg_type_name"', f'!"{kind}"',
                             '!"air.arg_name"', f'!"{name}"')
        match = re.fullmatch(r"(device|constant|threadgroup) (const )?(\w+) ?([*&])", kind)
        if attribute not in ("buffer", "threadgroup") or not match:
            raise Refusal(f"argument {name}: {kind} [[{attribute}]]")
        space, const, pointee, star = match.groups()
        pointee = TYPES.get(pointee, pointee)
        if pointee not in structs and pointee not in SCALARS:
            raise Refusal(f"argument {name}: a pointer to {pointee}")
        size, align = structs[pointee][:2] if pointee in structs else SCALARS[pointee][:2]
        items = [f"i32 {number}", '!"air.buffer"']
        items += ['!"air.buffer_size"', f"i32 {size}"] if star == "&" else []
        items += ['!"air.location_index"', f"i32 {index}", "i32 1",
                  '!"air.read"' if const or space == "constant" else '!"air.read_write"',
                  '!"air.address_space"', f"i32 {SPACES[space]}"]
        items += ['!"air.struct_type_info"', self.struct(pointee, structs)] if pointee in structs else []
        items += ['!"air.arg_type_size"', f"i32 {size}", '!"air.arg_type_align_size"', f"i32 {align}",
                  '!"air.arg_type_name"', f'!"{pointee}"', '!"air.arg_name"', f'!"{name}"']
        return self.node(*items)

    def kernel(self, name, types, arguments, structs):
        nodes = [self.argument(i, a, structs) for i, a in enumerate(arguments)]
        self.named("air.kernel", [self.node(f"void ({', '.join(types)})* @{name}", self.node(), self.node(*nodes))])

    def constants(self, constants):
        """constants: [(LLVM type, global that the runtime sets, Metal type, name, index)]"""
        nodes = [self.node(f"{of} addrspace(2)* @{set_by}", f'!"{kind}"', f'!"{name}"', f"i32 {index}", "i1 true")
                 for of, set_by, kind, name, index in constants]
        if nodes:
            self.named("air.function_constants", nodes)
