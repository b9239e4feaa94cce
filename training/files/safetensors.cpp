#include "training/files/safetensors.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/dtype.h"
#include "base/error.h"
#include "base/half.h"
#include "base/mapped_pages.h"

namespace train_gpt {

static_assert(std::endian::native == std::endian::little, "tensors are stored as little-endian");

namespace {

using nlohmann::json;

constexpr uint64_t max_header = 100'000'000;  // the limit of the reference implementation
constexpr uint64_t data_alignment = 64;
constexpr const char* metadata_key = "__metadata__";

struct DTypeSize {
    const char* name;
    uint64_t bytes;
};
constexpr DTypeSize dtypes[] = {
    {"F64", 8}, {"F32", 4}, {"F16", 2},  {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"I64", 8}, {"I32", 4}, {"I16", 2},  {"I8", 1},   {"U64", 8},     {"U32", 4},
    {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"C64", 8},  {"F8_E8M0", 1},
};

/// Bytes of an element; 0 for a dtype that does not exist.
uint64_t element_size(const std::string& dtype) {
    for (const DTypeSize& known : dtypes)
        if (dtype == known.name) return known.bytes;
    return 0;
}

std::string shape_text(std::span<const int64_t> shape) {
    std::string text = "[";
    for (const int64_t extent : shape)
        text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
    return text + "]";
}

/// Computes shape × element size; false when that does not fit into 63 bits.
bool byte_count(const TensorInfo& info, uint64_t* bytes) {
    *bytes = element_size(info.dtype);
    // An extent of 0 makes the tensor empty, whatever the others are.
    if (std::find(info.shape.begin(), info.shape.end(), 0) != info.shape.end()) {
        *bytes = 0;
        return true;
    }
    for (const int64_t extent : info.shape) {
        if (*bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / extent))
            return false;
        *bytes *= static_cast<uint64_t>(extent);
    }
    return true;
}

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
    throw Error(path.string(), " is not a usable safetensors file: ", what,
                "; copy or download it again");
}

/// A whole number in [0, 2^63).
bool natural(const json& value, uint64_t* out) {
    if (!value.is_number_unsigned()) return false;
    *out = value.get<uint64_t>();
    return *out <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

/// Parses the header. Refuses duplicate keys: keeping only the last of them would hide a damaged
/// header.
json parse_header(const std::filesystem::path& path, const char* text, size_t size) {
    std::vector<std::set<std::string>> open_objects;
    const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
        if (depth > 3) refuse(path, "its header is nested deeper than the format allows");
        if (event == json::parse_event_t::object_start) open_objects.emplace_back();
        if (event == json::parse_event_t::object_end) open_objects.pop_back();
        if (event == json::parse_event_t::key &&
            !open_objects.back().insert(parsed.get_ref<const std::string&>()).second)
            refuse(path, concat("its header names ", quoted(parsed.get<std::string>()), " twice"));
        return true;
    };
    if (const auto* nul = static_cast<const char*>(std::memchr(text, '\0', size)))
        refuse(path, concat("its header has a NUL byte (byte ", 9 + (nul - text), " of the file)"));
    try {
        return json::parse(text, text + size, check);
    } catch (const json::parse_error& error) {
        refuse(path,
               concat("its header is not valid JSON (byte ", 8 + error.byte, " of the file)"));
    } catch (const json::exception&) {
        refuse(path, "its header holds a number out of range");
    }
}

TensorInfo parse_tensor(const std::filesystem::path& path, const std::string& name,
                        const json& entry) {
    const auto bad = [&](const auto&... what) {
        refuse(path, concat("tensor ", quoted(name), " ", what...));
    };
    if (!entry.is_object()) bad("is not described by an object");
    for (const char* key : {"dtype", "shape", "data_offsets"})
        if (!entry.contains(key)) bad("has no \"", key, "\"");
    if (entry.size() != 3) bad("has a key besides dtype, shape and data_offsets");

    TensorInfo info;
    info.name = name;
    if (!entry["dtype"].is_string()) bad("has a dtype that is not a text");
    info.dtype = entry["dtype"].get<std::string>();
    const uint64_t size = element_size(info.dtype);
    if (size == 0) bad("has the unknown dtype ", quoted(info.dtype));

    if (!entry["shape"].is_array()) bad("has a shape that is not a list");
    for (const json& extent : entry["shape"]) {
        uint64_t value = 0;
        if (!natural(extent, &value))
            bad("has a shape with an extent that is not a whole number >= 0");
        info.shape.push_back(static_cast<int64_t>(value));
    }
    const json& offsets = entry["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !natural(offsets[0], &info.begin) ||
        !natural(offsets[1], &info.end) || info.end < info.begin)
        bad("has data_offsets that are not [begin, end]");

    uint64_t bytes = 0;
    if (!byte_count(info, &bytes) || bytes != info.end - info.begin)
        bad("has ", info.end - info.begin, " bytes, which is not what ", info.dtype, " ",
            shape_text(info.shape), " takes");
    return info;
}

/// Calls put(i, element) for n elements of type T at p, which need not be aligned.
template <class T, class Put>
void for_each_element(const std::byte* p, int64_t n, Put put) {
    for (int64_t i = 0; i < n; ++i) {
        T value;
        std::memcpy(&value, p + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        put(i, value);
    }
}

}  // namespace

std::string quoted(const std::string& name) {
    size_t length = std::min<size_t>(name.size(), 100);
    while (length < name.size() && length > 0 && (name[length] & 0xc0) == 0x80)
        --length;  // not within a UTF-8 character
    std::string text = "\"";
    for (const char c : name.substr(0, length))
        text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    return text + (length < name.size() ? "…\"" : "\"");
}

int64_t TensorInfo::numel() const {
    const uint64_t size = element_size(dtype);
    uint64_t bytes = 0;
    if (size == 0 || !byte_count(*this, &bytes))
        throw Error("tensor ", quoted(name), " of shape ", shape_text(shape), " is too large");
    return static_cast<int64_t>(bytes / size);
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
    const std::span<const std::byte> bytes = file_.bytes();
    uint64_t header = 0;
    if (bytes.size() < sizeof header) refuse(path, concat("it has only ", bytes.size(), " bytes"));
    std::memcpy(&header, bytes.data(), sizeof header);
    if (header > max_header || header > bytes.size() - sizeof header)
        refuse(path, concat("its length field gives a header of ", header, " bytes, but has ",
                            bytes.size(), " bytes in all"));
    data_start_ = sizeof header + header;
    const uint64_t data_bytes = bytes.size() - data_start_;

    const json root = parse_header(path, file_.text().data() + sizeof header, header);
    if (!root.is_object()) refuse(path, "its header is not a JSON object");
    for (const auto& [name, entry] : root.items()) {
        if (name != metadata_key) {
            tensors_.push_back(parse_tensor(path, name, entry));
            continue;
        }
        if (!entry.is_object()) refuse(path, "its __metadata__ is not an object");
        for (const auto& [key, value] : entry.items()) {
            if (!value.is_string())
                refuse(path, concat("its metadata ", quoted(key), " is not a text"));
            metadata_[key] = value.get<std::string>();
        }
    }

    std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
        return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
    });
    uint64_t reached = 0;
    for (const TensorInfo& info : tensors_) {
        if (info.end > data_bytes)
            refuse(path, concat("tensor ", quoted(info.name), " ends at byte ", info.end,
                                " of the data, of which only ", data_bytes, " are there"));
        if (info.begin != reached)
            refuse(path, concat("tensor ", quoted(info.name), " begins at byte ", info.begin,
                                " of the data, but the tensor before it ends at ", reached));
        reached = info.end;
    }
    if (reached != data_bytes)
        refuse(path, concat("its tensors take ", reached, " bytes, but ", data_bytes,
                            " follow the header"));
    for (const TensorInfo& info : tensors_) by_name_[info.name] = &info;
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
}

const TensorInfo& SafetensorsFile::at(const std::string& name) const {
    const TensorInfo* info = find(name);
    if (!info)
        throw Error(path().string(), " has no tensor ", quoted(name),
                    "; it does not belong to a model of this kind");
    return *info;
}

const TensorInfo& SafetensorsFile::at(const std::string& name,
                                      std::span<const int64_t> shape) const {
    const TensorInfo& info = at(name);
    if (!std::equal(shape.begin(), shape.end(), info.shape.begin(), info.shape.end()))
        throw Error(path().string(), ": tensor ", quoted(name), " has the shape ",
                    shape_text(info.shape), ", but this model needs ", shape_text(shape),
                    "; use a configuration of the same shape");
    return info;
}

std::span<const std::byte> SafetensorsFile::data(const TensorInfo& info) const {
    return file_.bytes().subspan(data_start_ + info.begin, info.end - info.begin);
}

/// Keeps a few pages of the file in memory alone, however large it is.
void SafetensorsFile::count_read(uint64_t bytes) const {
    const std::atomic_ref<uint64_t> read(read_);
    if ((read += bytes) < most_mapped_bytes) return;
    read = 0;
    release_pages(file_.bytes());
}

void SafetensorsFile::read_floats(const TensorInfo& info, float* out, int64_t first,
                                  int64_t count) const {
    const int64_t n = info.numel();
    if (count < 0) count = n - first;
    if (first < 0 || first > n || count < 0 || count > n - first)
        throw Error(path().string(), ": tensor ", quoted(info.name), " has ", n, " elements, but ",
                    count, " from ", first, " on were asked for");
    // In pieces, so that a tensor of any size is in memory once.
    constexpr int64_t piece = 1 << 20;
    for (; count > piece; first += piece, out += piece, count -= piece)
        read_floats(info, out, first, piece);
    if (count == 0) return;
    const std::byte* from =
        data(info).data() + static_cast<uint64_t>(first) * element_size(info.dtype);
    count_read(static_cast<uint64_t>(count) * element_size(info.dtype));
    if (info.dtype == "F32") {
        std::memcpy(out, from, static_cast<size_t>(count) * sizeof(float));
    } else if (info.dtype == "F64") {
        for_each_element<double>(from, count,
                                 [&](int64_t i, double x) { out[i] = static_cast<float>(x); });
    } else if (info.dtype == "F16") {
        for_each_element<fp16>(from, count,
                               [&](int64_t i, fp16 x) { out[i] = static_cast<float>(x); });
    } else if (info.dtype == "BF16") {
        for_each_element<bf16>(from, count, [&](int64_t i, bf16 x) { out[i] = to_float(x); });
    } else {
        throw Error(path().string(), ": tensor ", quoted(info.name), " is of dtype ", info.dtype,
                    ", but floating-point numbers (F32, BF16, F16 or F64) are needed here");
    }
}

std::vector<int32_t> SafetensorsFile::read_integers(const TensorInfo& info) const {
    std::vector<int32_t> values(static_cast<size_t>(info.numel()));
    const std::byte* from = data(info).data();
    const auto put = [&](int64_t i, int64_t x) {
        if (x != static_cast<int32_t>(x))
            throw Error(path().string(), ": tensor ", quoted(info.name), " holds ", x, " at ", i,
                        ", which does not fit into 32 bits");
        values[static_cast<size_t>(i)] = static_cast<int32_t>(x);
    };
    const auto n = static_cast<int64_t>(values.size());
    if (info.dtype == "I64")
        for_each_element<int64_t>(from, n, put);
    else if (info.dtype == "I32")
        for_each_element<int32_t>(from, n, put);
    else if (info.dtype == "I16")
        for_each_element<int16_t>(from, n, put);
    else if (info.dtype == "I8")
        for_each_element<int8_t>(from, n, put);
    else if (info.dtype == "U32")
        for_each_element<uint32_t>(from, n, put);
    else if (info.dtype == "U16")
        for_each_element<uint16_t>(from, n, put);
    else if (info.dtype == "U8")
        for_each_element<uint8_t>(from, n, put);
    else
        throw Error(path().string(), ": tensor ", quoted(info.name), " is of dtype ", info.dtype,
                    ", but whole numbers are needed here");
    return values;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), path_(path), tensors_(std::move(tensors)) {
    const auto bad = [&](const TensorInfo& info, const auto&... what) {
        throw Error("cannot write ", path_.string(), ": tensor ", quoted(info.name), " ", what...);
    };
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!metadata.empty()) header[metadata_key] = metadata;
    std::set<std::string> names;
    for (TensorInfo& info : tensors_) {
        if (info.name == metadata_key) bad(info, "has a name that the format reserves");
        if (!names.insert(info.name).second) bad(info, "appears twice");
        if (element_size(info.dtype) == 0) bad(info, "has the unknown dtype ", quoted(info.dtype));
        for (const int64_t extent : info.shape)
            if (extent < 0) bad(info, "has the negative extent ", extent);
        uint64_t bytes = 0;
        if (!byte_count(info, &bytes) || bytes > uint64_t{1} << 62 || expected_ > uint64_t{1} << 62)
            bad(info, "is too large");
        info.begin = expected_;
        info.end = expected_ += bytes;
    }
    // Filled directly, not through operator[]: an ordered_json looks keys up linearly.
    auto& entries = header.get_ref<nlohmann::ordered_json::object_t&>();
    for (const TensorInfo& info : tensors_)
        entries.emplace_back(info.name,
                             nlohmann::ordered_json{{"dtype", info.dtype},
                                                    {"shape", info.shape},
                                                    {"data_offsets", {info.begin, info.end}}});
    std::string text;
    try {
        text = header.dump();
    } catch (const nlohmann::json::exception&) {
        throw Error("cannot write ", path_.string(),
                    ": a tensor's name or the metadata is not valid UTF-8");
    }
    uint64_t length = sizeof length + text.size();
    text.append((data_alignment - length % data_alignment) % data_alignment, ' ');
    length = text.size();
    if (length > max_header)
        throw Error("cannot write ", path_.string(), ": ", tensors_.size(),
                    " tensors are too many for one file");
    file_.write(std::as_bytes(std::span(&length, 1)));
    file_.write(text);
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
    if (bytes.size() > expected_ - appended_)
        throw Error("cannot write ", path_.string(), ": more than the announced ", expected_,
                    " bytes of tensors");
    file_.write(bytes);
    appended_ += bytes.size();
}

void SafetensorsWriter::commit() {
    if (appended_ != expected_)
        throw Error("cannot write ", path_.string(), ": only ", appended_, " of the announced ",
                    expected_, " bytes of tensors were given");
    file_.commit();
}

}  // namespace train_gpt
