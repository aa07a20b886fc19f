// The shaders of the Swift package, for tqkv_metal_desc.
import Foundation

public enum TqkvLibrary {
    /// The path of default.metallib, which is for macOS: `library_path`.
    public static var path: String? { Bundle.module.path(forResource: "default", ofType: "metallib") }
    /// All shaders in one text, for systems that default.metallib is not for: `library_source`.
    public static var source: String? {
        Bundle.module.url(forResource: "tqkv", withExtension: "metal").flatMap { try? String(contentsOf: $0, encoding: .utf8) }
    }
}
