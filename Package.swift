// swift-tools-version:5.7
// The C module CTqkv, the Metal calls behind it, and the compiled shaders as a resource. Versions are git tags, as in
// tqkv.h. No Swift compiler has read this file yet: docs/metal.md says what was checked.
import PackageDescription

let package = Package(
    name: "tqkv",
    platforms: [.macOS(.v13), .iOS(.v16)],
    products: [
        .library(name: "Tqkv", targets: ["CTqkv"]),
        .library(name: "TqkvMetal", targets: ["CTqkvMetal", "TqkvLibrary"]),
    ],
    targets: [
        // xxhash.h alone is used, by the file with the implementation.
        .systemLibrary(
            name: "CXxhash", path: "packaging/swift/CXxhash", pkgConfig: "libxxhash",
            providers: [.brew(["xxhash"]), .apt(["libxxhash-dev"])]),
        .target(
            name: "CTqkv", dependencies: ["CXxhash"], path: "packaging/swift/CTqkv",
            linkerSettings: [.linkedLibrary("m", .when(platforms: [.linux]))]),
        .target(
            name: "CTqkvMetal", dependencies: ["CTqkv"], path: "packaging/swift/CTqkvMetal",
            linkerSettings: [
                .linkedFramework("Foundation", .when(platforms: [.macOS, .iOS])),
                .linkedFramework("Metal", .when(platforms: [.macOS, .iOS])),
            ]),
        .target(
            name: "TqkvLibrary", path: "metallib",
            exclude: ["README.md", "air", "amalgamate.py", "msl.py", "record.py", "rules.mk"],
            sources: ["TqkvLibrary.swift"],
            resources: [.copy("default.metallib"), .copy("tqkv.metal")]),
    ]
)
