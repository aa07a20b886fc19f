"""Reads shaders by their text: attributes, function constants, kernels with their arguments, headers."""
import os
import re

ATTRIBUTE = re.compile(r"\[\[\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?\s*\]\]")
FUNCTION_CONSTANT = re.compile(r"(?m)^constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\s*(\w+)\s*\)\s*\]\]\s*;")
KERNEL = re.compile(r"\bkernel\s+void\s+([\w#]+)\s*\(")
LIST = re.compile(r"(?m)^#define\s+(\w+)[ \t]+((?:[^\n]*\\\n)*[^\n]*)")
DEFINE = re.compile(r"(?m)^#define\s+(\w+)\((\w+(?:, \w+)*)\)((?:[^\n]*\\\n)*[^\n]*)")


def blank(match):
    """The matched text as spaces; lines stay lines."""
    return re.sub(r"[^\n\\]", " ", match.group(0))


def without_comments(source):
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.S)


def closing(source, start):
    """Index of the parenthesis that closes the one at start."""
    depth = 0
    for i in range(start, len(source)):
        depth += {"(": 1, ")": -1}.get(source[i], 0)
        if depth == 0:
            return i
    raise SystemExit("unbalanced parentheses")


def arguments_at(text):
    """[(index, text)] between the commas outside of all brackets."""
    depth, last, parts = 0, 0, []
    for i, c in enumerate(text):
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append((last, text[last:i]))
            last = i + 1
    return parts + [(last, text[last:])]


def split_arguments(text):
    return [part.strip() for _, part in arguments_at(text) if part.strip()]


def expand_kernel_macros(source):
    """Source followed by every use at column 0 of a macro whose body defines kernels, expanded."""
    source = without_comments(source)
    expanded = DEFINE.sub(blank, source)
    for name, parameters, body in DEFINE.findall(source):
        if not KERNEL.search(body):
            continue
        for values in re.findall(r"(?m)^" + name + r"\((\w+(?:, \w+)*)\)", source):
            text = body.replace("\\\n", "\n")
            for parameter, value in zip(parameters.split(", "), values.split(", ")):
                text = re.sub(r"##\s*" + parameter + r"\b", value, text)
                text = re.sub(r"\b" + parameter + r"\b", value, text)
            expanded += "\n" + text
    return expanded


def argument_lists(path):
    """{name: text} of the macros without parameters that list arguments of kernels, in the file and its headers."""
    found = (macro for part in included(path) for macro in LIST.findall(without_comments(read(part))))
    return {name: body.replace("\\\n", "\n") for name, body in found if ATTRIBUTE.search(body)}


def kernels(path):
    """[(name, [(type, argument name, [(attribute, index)])])] of all kernels of a file."""
    found = []
    text = expand_kernel_macros(read(path))
    for name, arguments in argument_lists(path).items():
        text = re.sub(rf"\b{name}\b", lambda _: arguments, text)
    for match in KERNEL.finditer(text):
        arguments = []
        for argument in split_arguments(text[match.end():closing(text, match.end() - 1)]):
            attributes = ATTRIBUTE.findall(argument)
            kind, name = re.match(r"(.*?)(\w+)$", ATTRIBUTE.sub("", argument).strip(), re.S).groups()
            arguments.append((" ".join(kind.split()), name, attributes))
        found.append((match.group(1), arguments))
    return found


def headers(path, seen):
    """The file and every header it includes by quotes, headers first."""
    for name in re.findall(r'(?m)^#include "([^"]+)"', read(path)):
        other = os.path.normpath(os.path.join(os.path.dirname(path), name))
        if other not in seen and os.path.exists(other):
            headers(other, seen)
    seen.append(path)
    return seen


def included(path):
    """The same without those of src/, which are plain C."""
    return [part for part in headers(path, []) if "src" not in os.path.dirname(part).split(os.sep)]


def constant_numbers(path):
    """{name: index} of the function constants that the file and its headers name."""
    return {name: int(n) for part in headers(path, []) for name, n in re.findall(r"(?m)^#define (TQKV_FC_\w+)\s+(\d+)", read(part))}


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()
