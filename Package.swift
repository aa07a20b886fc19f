// swift-tools-version:5.7
// The C module CTqkv, the Metal calls behind it, and the compiled shaders as a resource. Versions are git tags, as in
// tqkv.h. `swift test` runs packaging/swift/tests.
import PackageDescription

let package = Package(
    name: "tqkv",
    platforms: [.macOS(.v13), .iOS(.v16)],
    products: [
        .library(name: "Tqkv", targets: ["CTqkv"]),
        .library(name: "TqkvMetal", targets: ["CTqkv", "CTqkvMetal", "TqkvLibrary"]),
    ],
    targets: [
        // xxhash/xxhash.h is a copy of that of xxHash, because a package can ask nobody to install one. Only the file with
        // the implementation includes it, and finds it before any other.
        .target(
            name: "CTqkv", path: "packaging/swift/CTqkv", cSettings: [.headerSearchPath("xxhash")],
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
        .testTarget(
            name: "TqkvTests", dependencies: ["CTqkv", "CTqkvMetal", "TqkvLibrary"], path: "packaging/swift/tests"),
    ]
)
