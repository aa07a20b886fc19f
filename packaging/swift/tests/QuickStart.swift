import CTqkv
import Foundation
import TqkvLibrary
import XCTest
#if canImport(Metal)
import CTqkvMetal
#endif

struct Refused: Error, CustomStringConvertible {
    let description: String
}

func check(_ result: tqkv_result) throws {
    guard result == TQKV_OK else { throw Refused(description: String(cString: tqkv_result_string(result))) }
}

/// README's quick start: tokens go in, the newest attends, beside attention over the rows as they were.
final class QuickStart: XCTestCase {
    let headDim = 128, nKvHeads = 8, nHeads = 32, nTokens = 300

    /// Numbers in [-1, 1), the same on every system.
    func numbers(_ count: Int, seed: UInt64) -> [Float] {
        var state = seed
        var made = [Float]()
        for _ in 0..<count {
            state = state &* 6_364_136_223_846_793_005 &+ 1_442_695_040_888_963_407
            made.append(Float(state >> 40) / 8_388_608 - 1)
        }
        return made
    }

    func attention(_ q: [Float], _ k: [Float], _ v: [Float]) -> [Double] {
        var out = [Double](repeating: 0, count: nHeads * headDim)
        for head in 0..<nHeads {
            let kvHead = head / (nHeads / nKvHeads)
            var weights = [Double]()
            for token in 0..<nTokens {
                let row = (token * nKvHeads + kvHead) * headDim
                var score = 0.0
                for i in 0..<headDim { score += Double(q[head * headDim + i]) * Double(k[row + i]) }
                weights.append(exp(score / Double(headDim).squareRoot()))
            }
            let sum = weights.reduce(0, +)
            for token in 0..<nTokens {
                let row = (token * nKvHeads + kvHead) * headDim
                for i in 0..<headDim { out[head * headDim + i] += weights[token] / sum * Double(v[row + i]) }
            }
        }
        return out
    }

    /// The relative error of attention from a cache of these formats.
    func relativeError(_ keys: tqkv_format, _ values: tqkv_format, metal: OpaquePointer? = nil) throws -> Double {
        var desc = tqkv_cache_desc(), created: OpaquePointer?
        desc.head_dim = Int32(headDim)
        desc.n_kv_heads = Int32(nKvHeads)
        desc.n_heads = Int32(nHeads)
        desc.capacity = 4096
        desc.key_format = keys
        desc.value_format = values
        desc.metal = metal
        try check(tqkv_cache_create(&desc, &created))
        let cache = try XCTUnwrap(created)
        defer { tqkv_cache_destroy(cache) }

        let k = numbers(nTokens * nKvHeads * headDim, seed: 1)
        let v = numbers(nTokens * nKvHeads * headDim, seed: 2)
        let q = numbers(nHeads * headDim, seed: 3)
        var out = [Float](repeating: 0, count: nHeads * headDim)
        try check(tqkv_cache_append(cache, k, v, Int32(nTokens)))
        try check(tqkv_cache_attend(cache, q, 1, &out))
        XCTAssertEqual(tqkv_cache_end(cache), Int64(nTokens))

        let expected = attention(q, k, v)
        var noise = 0.0, signal = 0.0
        for (i, e) in expected.enumerated() {
            noise += (Double(out[i]) - e) * (Double(out[i]) - e)
            signal += e * e
        }
        return (noise / signal).squareRoot()
    }

    func testProcessor() throws {
        XCTAssertLessThan(try relativeError(TQKV_F16, TQKV_F16), 0.001)
        XCTAssertLessThan(try relativeError(TQKV_FORMAT_DEFAULT, TQKV_FORMAT_DEFAULT), 0.15)
    }

    func testRefusal() throws {
        var desc = tqkv_cache_desc(), created: OpaquePointer?
        desc.head_dim = 100
        desc.n_kv_heads = 1
        desc.capacity = 64
        XCTAssertThrowsError(try check(tqkv_cache_create(&desc, &created)))
        XCTAssertNil(created)
    }

    func testShaders() throws {
        let source = try XCTUnwrap(TqkvLibrary.source)
        XCTAssertTrue(source.contains("kernel void"))
        #if os(macOS)
        XCTAssertNotNil(TqkvLibrary.path)
        #else
        XCTAssertNil(TqkvLibrary.path)
        #endif
    }

    func testMetal() throws {
        #if canImport(Metal)
        var settings = tqkv_metal_desc(), metal: OpaquePointer?
        let path = TqkvLibrary.path.flatMap { strdup($0) }
        let source = TqkvLibrary.source.flatMap { strdup($0) }
        defer { free(path); free(source) }
        settings.library_path = UnsafePointer(path)
        settings.library_source = UnsafePointer(source)
        let result = tqkv_metal_create(&settings, &metal)
        try XCTSkipIf(result == TQKV_UNSUPPORTED, "this GPU is older than family Apple7")
        try check(result)
        defer { tqkv_metal_destroy(metal) }
        XCTAssertLessThan(try relativeError(TQKV_F16, TQKV_F16, metal: metal), 0.001)
        XCTAssertLessThan(try relativeError(TQKV_FORMAT_DEFAULT, TQKV_FORMAT_DEFAULT, metal: metal), 0.15)
        #else
        throw XCTSkip("this system has no Metal")
        #endif
    }
}
