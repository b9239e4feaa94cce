#include "training/files/grids_file.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/error.h"
#include "kernels/exact_math.h"
#include "training/files/safetensors.h"

namespace train_gpt {

namespace {

constexpr const char* grids_name = "grids.safetensors";

std::vector<int64_t> shape_of(const TensorPlace& place) { return {place.parts, place.blocks}; }

}  // namespace

std::string write_grids(const std::filesystem::path& checkpoint, const GridLayout& layout,
                        std::span<const int32_t> exponents) {
    std::vector<TensorInfo> tensors;
    for (const TensorPlace& place : layout.places())
        tensors.push_back({.name = place.name, .dtype = "I32", .shape = shape_of(place)});
    SafetensorsWriter writer(checkpoint / grids_name, std::move(tensors));
    // In the order of the places.
    writer.append(std::as_bytes(exponents));
    writer.commit();
    return grids_name;
}

bool read_grids(const std::filesystem::path& checkpoint, Stream& stream, Grids& grids) {
    const std::filesystem::path path = checkpoint / grids_name;
    if (!std::filesystem::exists(path)) return false;
    const SafetensorsFile file(path);
    std::vector<int32_t> all;
    for (const TensorPlace& place : grids.layout().places()) {
        const TensorInfo& tensor = file.at(place.name);
        if (tensor.shape != shape_of(place)) return false;
        const std::vector<int32_t> exponents = file.read_integers(tensor);
        if (std::ranges::any_of(exponents, [](int32_t e) { return e != clamped_exponent(e); }))
            throw Error(path.string(), ": ", quoted(place.name), " has an exponent beyond ±",
                        max_exponent, "; restore the checkpoint from a copy or use another one");
        all.insert(all.end(), exponents.begin(), exponents.end());
    }
    grids.set_exponents(stream, all);
    return true;
}

}  // namespace train_gpt
