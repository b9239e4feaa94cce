// Fingerprints: hashes of tensors that are sums over elements. Pieces of a tensor may be hashed by
// any ranks, in any order, and added up.
//
//   h(x) = Σ over elements i of mix(i rotated left by 32 bits, xor bits(x_i))   modulo 2^64
//   mix    the step and the bijection of SplitMix64: Steele, Lea & Flood, "Fast splittable
//          pseudorandom number generators", OOPSLA 2014
//
// i counts from 0. Elements have 32, 16 or 8 bits. Two tensors that differ in a single element have
// different fingerprints, since mix is a bijection.
#pragma once
#include <cstdint>
#include <span>

#include "device/stream.h"

namespace train_gpt {

constexpr uint64_t mix64(uint64_t z) {
    z += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}
/// What element i adds to its tensor's fingerprint.
constexpr uint64_t hash_of_element(uint64_t i, uint32_t bits) {
    return mix64((i << 32 | i >> 32) ^ bits);
}

/// Elements first … first + n of a tensor, whose part of the fingerprint is added to *sum. Segments
/// may share a sum.
struct FingerprintSegment {
    const void* data = nullptr;  // of element `first`
    int element_bytes = 4;       // 4, 2 or 1
    int64_t first = 0, n = 0;
    uint64_t* sum = nullptr;
};
/// One pass over memory.
void add_fingerprints(Stream& stream, std::span<const FingerprintSegment> segments);

namespace cuda {  // fingerprint.cu
void add_fingerprints(Stream& stream, std::span<const FingerprintSegment> segments);
}  // namespace cuda

}  // namespace train_gpt
