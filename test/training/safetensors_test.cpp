#include "training/files/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>

#include "base/dtype.h"
#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt {

namespace {

/// A file with the given header text and data, as the format lays it out.
std::string raw_file(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    std::string bytes(sizeof length, '\0');
    std::memcpy(bytes.data(), &length, sizeof length);
    return bytes + header + data;
}

void put(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

std::string error_of(const std::string& path) {
    try {
        SafetensorsFile file(path);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
}

}  // namespace

TEST_CASE("what a SafetensorsWriter wrote, a SafetensorsFile reads back") {
    const TemporaryDirectory folder;
    const auto n = random_int(1, 300), m = random_int(1, 40);
    const std::vector<float> floats = random_normal(static_cast<size_t>(n * m));
    std::vector<bf16> halves;
    for (const float x : floats) halves.emplace_back(x);
    std::vector<int64_t> integers(static_cast<size_t>(n));
    for (auto& x : integers) x = random_int(-1000000, 1000000);

    const std::string path = folder / "a.safetensors";
    SafetensorsWriter writer(path,
                             {{"a \"quoted\" näme", "BF16", {n, m}},
                              {"scalar", "F32", {}},
                              {"b", "F32", {n, m}},
                              {"none", "F64", {3, 0}},
                              {"c", "I64", {n}}},
                             {{"format", "pt"}, {"step", "17"}});
    writer.append(bytes_of(halves));
    writer.append(std::as_bytes(std::span(floats).first(1)));
    const size_t cut = static_cast<size_t>(random_int(0, n * m * 4));
    writer.append(bytes_of(floats).first(cut));
    writer.append(bytes_of(floats).subspan(cut));
    writer.append(bytes_of(integers));
    REQUIRE_THROWS_AS(SafetensorsFile(path), Error);  // the file does not exist before commit()
    writer.commit();

    const SafetensorsFile file(path);
    REQUIRE(file.tensors().size() == 5);
    CHECK(file.tensors()[0].name == "a \"quoted\" näme");
    CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"step", "17"}});
    CHECK(file.find("missing") == nullptr);
    CHECK_THROWS_AS(file.at("missing"), Error);
    const std::vector<int64_t> right{n, m}, wrong{m, n, 1};
    CHECK(&file.at("b", right) == file.find("b"));
    CHECK_THROWS_AS(file.at("b", wrong), Error);
    CHECK(file.at("none").numel() == 0);
    CHECK(file.at("scalar").numel() == 1);

    std::vector<float> read(floats.size());
    file.read_floats(file.at("b"), read.data());
    CHECK(read == floats);
    file.read_floats(file.tensors()[0], read.data());
    for (size_t i = 0; i < floats.size(); ++i) REQUIRE(read[i] == to_float(halves[i]));
    file.read_floats(file.at("scalar"), read.data());
    CHECK(read[0] == floats[0]);
    const int64_t first = random_int(0, n * m - 1), count = random_int(0, n * m - first);
    std::vector<float> part(static_cast<size_t>(count) + 1, 7.0f);
    file.read_floats(file.at("b"), part.data(), first, count);
    CHECK(std::equal(part.begin(), part.end() - 1, floats.begin() + first));
    CHECK(part.back() == 7.0f);
    CHECK_THROWS_AS(file.read_floats(file.at("b"), part.data(), first, n * m - first + 1), Error);
    CHECK_THROWS_AS(file.read_floats(file.at("c"), part.data()), Error);

    const std::vector<int32_t> as_int32(integers.begin(), integers.end());
    CHECK(file.read_integers(file.at("c")) == as_int32);
    CHECK_THROWS_AS(file.read_integers(file.at("b")), Error);

    uint64_t header = 0;
    const MappedFile mapped(path);
    std::memcpy(&header, mapped.bytes().data(), sizeof header);
    CHECK((8 + header) % 64 == 0);
}

TEST_CASE("every half-precision value reads as the float it stands for") {
    const TemporaryDirectory folder;
    std::vector<uint16_t> bits(65536);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
    const std::string path = folder / "half.safetensors";
    SafetensorsWriter writer(path, {{"half", "F16", {65536}}});
    writer.append(bytes_of(bits));
    writer.commit();
    const SafetensorsFile file(path);
    std::vector<float> read(bits.size());
    file.read_floats(file.at("half"), read.data());
    for (size_t i = 0; i < bits.size(); ++i) {
        const int exponent = (bits[i] >> 10) & 31, fraction = bits[i] & 1023;
        const double sign = bits[i] & 0x8000 ? -1.0 : 1.0;
        CAPTURE(i);
        if (exponent == 31 && fraction) {
            REQUIRE(std::isnan(read[i]));
        } else {
            const double value = exponent == 31  ? INFINITY
                                 : exponent == 0 ? std::ldexp(fraction, -24)
                                                 : std::ldexp(1024 + fraction, exponent - 25);
            REQUIRE(read[i] == static_cast<float>(sign * value));
            REQUIRE(std::signbit(read[i]) == (sign < 0));
        }
    }
}

TEST_CASE("doubles round to the nearest float and large integers are refused") {
    const TemporaryDirectory folder;
    const std::vector<double> doubles{1.0 / 3.0, -2.5, 1e300};
    const std::vector<int64_t> large{5, int64_t{1} << 31};
    const std::string path = folder / "x.safetensors";
    SafetensorsWriter writer(path, {{"d", "F64", {3}}, {"i", "I64", {2}}});
    writer.append(bytes_of(doubles));
    writer.append(bytes_of(large));
    writer.commit();
    const SafetensorsFile file(path);
    float read[3];
    file.read_floats(file.at("d"), read);
    CHECK(read[0] == 1.0f / 3.0f);
    CHECK(read[1] == -2.5f);
    CHECK(std::isinf(read[2]));
    CHECK_THROWS_AS(file.read_integers(file.at("i")), Error);
}

TEST_CASE("a damaged safetensors header is refused with the file and the fault named") {
    const TemporaryDirectory folder;
    const std::string path = folder / "bad.safetensors";
    const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
    struct Case {
        std::string bytes, fault;
    };
    const std::string eight(8, 'x');
    const std::vector<Case> cases{
        {"", "only 0 bytes"},
        {"abc", "only 3 bytes"},
        {std::string(8, '\xff'), "header of 18446744073709551615 bytes"},
        {raw_file("{" + a + "}", "").substr(0, 30), "gives a header"},
        {raw_file("", ""), "not valid JSON"},
        {raw_file("{" + a, eight), "not valid JSON"},
        {raw_file("{\"\xff\xfe\":1}", ""), "not valid JSON"},
        {raw_file("[1]", ""), "not a JSON object"},
        {raw_file(std::string(5000, '['), ""), "nested"},
        {raw_file("{\"a\":1e9999}", ""), "out of range"},
        {raw_file("{" + a + "," + a + "}", eight), "\"a\" twice"},
        {raw_file(R"({"a":7})", ""), "\"a\" is not described by an object"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[2]}})", eight), "no \"data_offsets\""},
        {raw_file(R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", eight),
         "unknown dtype \"F33\""},
        {raw_file(R"({"a":{"dtype":32,"shape":[2],"data_offsets":[0,8]}})", eight),
         "dtype that is not a text"},
        {raw_file(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", eight),
         "shape that is not a list"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", eight),
         "not a whole number"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", eight),
         "not a whole number"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", eight),
         "[begin, end]"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", eight),
         "[begin, end]"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", eight), "F32 [3]"},
        {raw_file(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
                  ""),
         "has 0 bytes"},
        {raw_file("{" + a + "}", "1234567"), "only 7 are there"},
        {raw_file("{" + a + "}", eight + "x"), "take 8 bytes, but 9"},
        {raw_file("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", eight),
         "before it ends at 8"},
        {raw_file("{" + a + R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}})",
                  eight + "xx"),
         "begins at byte 9"},
        {raw_file("{" + a + R"(,"__metadata__":{"step":3}})", eight),
         "metadata \"step\" is not a text"},
        {raw_file("{" + a + R"(,"__metadata__":[]})", eight), "__metadata__ is not an object"},
    };
    put(path, raw_file("{" + a + "}", eight));
    REQUIRE(error_of(path) == "");
    for (const Case& c : cases) {
        put(path, c.bytes);
        const std::string error = error_of(path);
        CAPTURE(c.fault, error);
        CHECK(contains(error, path));
        CHECK(contains(error, c.fault));
        CHECK_FALSE(contains(error, "\n"));
    }
}

TEST_CASE("a safetensors file with random damage is read or refused, never worse") {
    const TemporaryDirectory folder;
    const std::string path = folder / "fuzz.safetensors";
    const std::string good =
        raw_file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16",)"
                 R"("shape":[2,3],"data_offsets":[8,20]},"__metadata__":{"format":"pt"}}  )",
                 std::string(20, 'x'));
    int refused = 0;
    for (int round = 0; round < 500; ++round) {
        std::string bytes = good;
        for (int64_t i = random_int(1, 4); i > 0; --i)
            bytes[static_cast<size_t>(random_int(0, static_cast<int64_t>(bytes.size()) - 1))] =
                static_cast<char>(random_int(0, 255));
        if (random_int(0, 3) == 0) bytes.resize(static_cast<size_t>(random_int(0, 200)));
        put(path, bytes);
        try {
            const SafetensorsFile file(path);
            for (const TensorInfo& info : file.tensors()) {
                std::vector<float> read(static_cast<size_t>(info.numel()));
                file.read_floats(info, read.data());
            }
        } catch (const Error& error) {
            ++refused;
            REQUIRE(contains(error.what(), path));
        }
    }
    CHECK(refused > 100);
}

TEST_CASE(
    "a SafetensorsWriter refuses what would not be a valid file and leaves the old one alone") {
    const TemporaryDirectory folder;
    const std::string path = folder / "a.safetensors";
    put(path, "old");
    const std::vector<std::byte> four(4);
    CHECK_THROWS_AS(SafetensorsWriter(path, {{"a", "F32", {1}}, {"a", "F32", {1}}}), Error);
    CHECK_THROWS_AS(SafetensorsWriter(path, {{"a", "float", {1}}}), Error);
    CHECK_THROWS_AS(SafetensorsWriter(path, {{"a", "F32", {-1}}}), Error);
    CHECK_THROWS_AS(SafetensorsWriter(path, {{"__metadata__", "F32", {1}}}), Error);
    CHECK_THROWS_AS(SafetensorsWriter(path, {{"\xff", "F32", {1}}}), Error);
    CHECK_THROWS_AS(SafetensorsWriter(path, {{"a", "F32", {int64_t{1} << 40, int64_t{1} << 40}}}),
                    Error);
    {
        SafetensorsWriter writer(path, {{"a", "F32", {2}}});
        writer.append(four);
        CHECK_THROWS_AS(writer.commit(), Error);
    }
    {
        SafetensorsWriter writer(path, {{"a", "F32", {1}}});
        writer.append(four);
        CHECK_THROWS_AS(writer.append(four), Error);
    }
    CHECK(MappedFile(path).text() == "old");
    SafetensorsWriter empty(path, {}, {});
    empty.commit();
    CHECK(SafetensorsFile(path).tensors().empty());
}

}  // namespace train_gpt
