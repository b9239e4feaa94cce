#include "test/file_difference.h"

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/safetensors.h"

using namespace train_gpt;

TEST_CASE("a comparison of files names the first tensor or byte that differs") {
    const TemporaryDirectory directory;
    const auto save = [&](const std::string& name, const std::vector<float>& values) {
        SafetensorsWriter file(directory / name,
                               {{"first", "F32", {2}}, {"second", "F32", {2, 3}}});
        file.append(std::as_bytes(std::span(values)));
        file.commit();
        return std::filesystem::path(directory / name);
    };
    const std::vector<float> values = random_normal(8);
    std::vector<float> others = values;
    others[2 + 4] = 0.5f;
    others[2 + 5] = 0.25f;
    const auto a = save("a.safetensors", values), b = save("b.safetensors", others);
    CHECK(file_difference(a, a) == "");
    CHECK(file_difference(a, save("same.safetensors", values)) == "");
    const std::string difference = file_difference(a, b);
    CHECK(contains(difference, "tensor second differs in 2 of 6 elements, first at [1, 1]: "));
    CHECK(contains(difference, "0.5 in " + b.string()));
    CHECK(contains(file_difference(a, directory / "none"), "there is no "));

    write(directory / "x", "some text");
    write(directory / "y", "some test, longer");
    CHECK(contains(file_difference(directory / "x", directory / "y"), "differ from byte 7 on"));
}
