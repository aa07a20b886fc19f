// The shaders of the Swift package, for tqkv_metal_desc. Set both: a text also serves where the library is refused.
import Foundation

public enum TqkvLibrary {
    /// The path of default.metallib, which is for macOS alone, nil elsewhere: `library_path`.
    public static var path: String? {
        #if os(macOS)
        return Bundle.module.path(forResource: "default", ofType: "metallib")
        #else
        return nil
        #endif
    }
    /// All shaders in one text, which the system compiles where there is no library or it is refused: `library_source`.
    public static var source: String? {
        Bundle.module.url(forResource: "tqkv", withExtension: "metal").flatMap { try? String(contentsOf: $0, encoding: .utf8) }
    }
}
