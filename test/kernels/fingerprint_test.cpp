#include "kernels/fingerprint.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "test/kernels/kernel_test.h"

using namespace train_gpt;

namespace {

/// The formula of the header with the widest integers there are, so that nothing but the ends of
/// the formula's own operations wraps.
uint64_t reference(const std::vector<uint32_t>& elements) {
    using Wide = unsigned __int128;
    constexpr Wide modulus = Wide{1} << 64;
    Wide sum = 0;
    for (size_t i = 0; i < elements.size(); ++i) {
        Wide z = (Wide{i} << 32) % modulus + (Wide{i} >> 32);
        z = ((z ^ elements[i]) + 0x9e3779b97f4a7c15) % modulus;
        z = (z ^ z / (Wide{1} << 30)) * 0xbf58476d1ce4e5b9 % modulus;
        z = (z ^ z / (Wide{1} << 27)) * 0x94d049bb133111eb % modulus;
        z = z ^ z / (Wide{1} << 31);
        sum = (sum + z) % modulus;
    }
    return static_cast<uint64_t>(sum);
}

/// A tensor of random bits on the device under test.
struct Tensor16or32 {
    int bytes = random_int(0, 2) == 0 ? 2 : 4;
    std::vector<uint32_t> elements;
    SharedArray<unsigned char> memory{0};

    Tensor16or32() {
        const int64_t n = random_int(0, 2) == 0
                              ? random_int(1, 40)
                              : random_int(1, device_is_simulated() ? 9000 : 30000);
        elements.resize(static_cast<size_t>(n));
        for (uint32_t& element : elements)
            element = static_cast<uint32_t>(test_rng()()) & (bytes == 2 ? 0xffffu : 0xffffffffu);
        memory = SharedArray<unsigned char>(elements.size() * static_cast<size_t>(bytes));
        store();
    }
    void store() const {
        const auto size = static_cast<size_t>(bytes);
        for (size_t i = 0; i < elements.size(); ++i)
            std::memcpy(memory.values().data() + i * size, &elements[i], size);
    }
    FingerprintSegment segment(int64_t first, int64_t end, uint64_t* sum) const {
        return {.data = memory.data() + first * bytes,
                .element_bytes = bytes,
                .first = first,
                .n = end - first,
                .sum = sum};
    }
    FingerprintSegment whole(uint64_t* sum) const { return segment(0, std::ssize(elements), sum); }
};

std::vector<uint64_t> fingerprints_of(const std::vector<FingerprintSegment>& segments,
                                      const SharedArray<uint64_t>& sums) {
    std::ranges::fill(sums.values(), 0);
    TestStream stream;
    add_fingerprints(stream, segments);
    return {sums.values().begin(), sums.values().end()};
}

}  // namespace

TEST_CASE("fingerprints follow their formula, however a tensor is cut into pieces", "[cuda]") {
    ON_EACH_DEVICE();
    const auto count = static_cast<size_t>(random_int(1, 5));
    const std::vector<Tensor16or32> tensors(count);
    const SharedArray<uint64_t> sums(count);
    std::vector<uint64_t> expected;
    std::vector<FingerprintSegment> whole, pieces;
    for (size_t t = 0; t < count; ++t) {
        expected.push_back(reference(tensors[t].elements));
        whole.push_back(tensors[t].whole(sums.data() + t));
        // Cuts of a tensor may lie anywhere, also at addresses that no pack begins at.
        const int64_t n = std::ssize(tensors[t].elements);
        for (int64_t first = 0, end; first < n; first = end) {
            end = std::min(n, first + random_int(1, random_int(0, 1) ? 100 : 2 * norm_block));
            pieces.push_back(tensors[t].segment(first, end, sums.data() + t));
        }
    }
    std::ranges::shuffle(pieces, test_rng());
    CHECK(fingerprints_of(whole, sums) == expected);
    CHECK(fingerprints_of(pieces, sums) == expected);
    if (!test_device().is_cuda())
        check_thread_independence([&] {
            const std::vector<uint64_t> found = fingerprints_of(pieces, sums);
            return std::string(reinterpret_cast<const char*>(found.data()), found.size() * 8);
        });
}

TEST_CASE("any single flipped bit, and any two elements that change places, change a fingerprint",
          "[cuda]") {
    ON_EACH_DEVICE();
    Tensor16or32 tensor;
    const SharedArray<uint64_t> sums(1);
    const std::vector<FingerprintSegment> whole{tensor.whole(sums.data())};
    const std::vector<uint64_t> before = fingerprints_of(whole, sums);
    const auto random_index = [&] {
        return static_cast<size_t>(random_int(0, std::ssize(tensor.elements) - 1));
    };
    for (int repeat = 0; repeat < 10; ++repeat) {
        const size_t i = random_index();
        const uint32_t bit = uint32_t{1} << random_int(0, 8 * tensor.bytes - 1);
        tensor.elements[i] ^= bit;
        tensor.store();
        CHECK(fingerprints_of(whole, sums) != before);
        tensor.elements[i] ^= bit;

        const size_t j = random_index();
        if (tensor.elements[i] == tensor.elements[j]) continue;
        std::swap(tensor.elements[i], tensor.elements[j]);
        tensor.store();
        CHECK(fingerprints_of(whole, sums) != before);
        std::swap(tensor.elements[i], tensor.elements[j]);
    }
    tensor.store();
    CHECK(fingerprints_of(whole, sums) == before);
}
