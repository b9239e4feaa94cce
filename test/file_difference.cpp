#include "test/file_difference.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "training/files/safetensors.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// One element as text: a number if the dtype is floating point, else its bytes.
std::string element(const SafetensorsFile& file, const TensorInfo& info, int64_t index) {
    const size_t size = (info.end - info.begin) / static_cast<size_t>(info.numel());
    if (info.dtype == "F32" || info.dtype == "F64" || info.dtype == "F16" || info.dtype == "BF16") {
        float value = 0;
        file.read_floats(info, &value, index, 1);
        char text[32];
        std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
        return text;
    }
    std::string text = "0x";
    for (const std::byte byte : file.data(info).subspan(static_cast<size_t>(index) * size, size)) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(byte));
        text += digits;
    }
    return text;
}

std::string index_text(const TensorInfo& info, int64_t index) {
    std::string text;
    for (auto extent = info.shape.rbegin(); extent != info.shape.rend(); ++extent) {
        text = concat(index % *extent, text.empty() ? "" : ", ", text);
        index /= *extent;
    }
    return "[" + text + "]";
}

/// The first tensor that differs; empty when the difference is elsewhere, such as in the header.
std::string tensor_difference(const fs::path& a, const fs::path& b) {
    const SafetensorsFile ours(a), theirs(b);
    for (const TensorInfo& info : ours.tensors()) {
        const TensorInfo* other = theirs.find(info.name);
        if (!other || other->dtype != info.dtype || other->shape != info.shape)
            return concat("tensor ", info.name, " of ", a.string(), " is ",
                          other ? "of another shape or dtype" : "missing", " in ", b.string());
        const auto x = ours.data(info), y = theirs.data(*other);
        if (std::ranges::equal(x, y)) continue;
        const int64_t n = info.numel();
        const size_t size = x.size() / static_cast<size_t>(n);
        int64_t first = -1, differing = 0;
        for (int64_t i = 0; i < n; ++i) {
            const size_t at = static_cast<size_t>(i) * size;
            if (std::memcmp(&x[at], &y[at], size) == 0) continue;
            if (differing++ == 0) first = i;
        }
        return concat("tensor ", info.name, " differs in ", differing, " of ", n,
                      " elements, first at ", index_text(info, first), ": ",
                      element(ours, info, first), " in ", a.string(), ", ",
                      element(theirs, *other, first), " in ", b.string());
    }
    return "";
}

}  // namespace

std::string file_difference(const fs::path& a, const fs::path& b) {
    for (const fs::path& path : {a, b})
        if (!fs::is_regular_file(path)) return concat("there is no ", path.string());
    const MappedFile ours(a), theirs(b);
    const std::string_view x = ours.text(), y = theirs.text();
    if (x == y) return "";
    std::string where;
    if (a.extension() == ".safetensors") try {
            where = tensor_difference(a, b);
        } catch (const Error& error) {
            where = error.what();  // one of them is damaged
        }
    if (!where.empty()) return where;
    const auto first = std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first - x.begin();
    return concat(a.string(), " (", x.size(), " bytes) and ", b.string(), " (", y.size(),
                  " bytes) differ from byte ", first, " on");
}

}  // namespace train_gpt
