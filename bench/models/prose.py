#!/usr/bin/env python3
"""The running text of pages of the Debian handbook, a paragraph a line: prose.py PAGE.html... > prose.txt"""
import html.parser
import sys

VOID = {"br", "hr", "img", "link", "meta", "input"}


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []  # for each element that is open: is it a paragraph?
        self.parts = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag == "div" and dict(attrs).get("class") == "para")

    def handle_endtag(self, tag):
        if tag not in VOID and self.open and self.open.pop():
            self.parts.append("\n")

    def handle_data(self, data):
        if any(self.open):
            self.parts.append(data.replace("\n", " "))


def main():
    for path in sys.argv[1:]:
        reader = Reader()
        with open(path, encoding="utf-8") as file:
            reader.feed(file.read())
        for line in "".join(reader.parts).splitlines():
            if line.strip():
                print(" ".join(line.split()))


if __name__ == "__main__":
    main()
