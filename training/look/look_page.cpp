#include "training/look/look_page.h"

#include <cmath>
#include <ctime>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/formatted.h"
#include "base/json_text.h"
#include "base/printable.h"
#include "base/version.h"
#include "training/look/attention_text.h"
#include "training/report/html_text.h"
// Made from training/report/page.css, look.html, look.css and look.js (Makefile).
#include "training/look/look_files.h"
#include "training/report/page_files.h"

namespace train_gpt {

namespace {

std::string number(double value) {
    return std::isfinite(value) ? formatted("%.4g", value) : std::string("null");
}

template <class T>
std::string array_of(const std::vector<T>& values) {
    std::string text;
    for (const T value : values)
        text += (text.empty() ? "" : ",") + number(static_cast<double>(value));
    return "[" + text + "]";
}

/// A token as text. Bytes that are a part of a character are escaped; so are control characters.
std::string token_text(const Tokenizer& tokenizer, int32_t token) {
    if (token < 0 || static_cast<uint32_t>(token) >= tokenizer.vocab_size())
        return concat("[token ", token, "]");
    const std::string text = printable(tokenizer.token_bytes(static_cast<uint32_t>(token)));
    return text.empty() ? concat("[token ", token, "]") : text;
}

std::string predictions_json(const Tokenizer& tokenizer, const std::vector<LikelyToken>& all) {
    std::string text;
    for (const LikelyToken& p : all)
        text += concat(text.empty() ? "" : ",", "[", json_string(token_text(tokenizer, p.token)),
                       ",", number(p.probability), "]");
    return "[" + text + "]";
}

std::string tokens_json(const LookPage& look) {
    std::string text;
    for (const TokenInside& token : look.inside.tokens)
        text += concat(text.empty() ? "" : ",\n",
                       "{\"text\":", json_string(token_text(look.tokenizer, token.token)),
                       ",\"id\":", token.token, ",\"loss\":", number(token.loss),
                       ",\"rank\":", token.rank,
                       ",\"expected\":", predictions_json(look.tokenizer, token.expected), "}");
    return "[" + text + "]";
}

std::string layer_json(const LayerInside& layer, const std::vector<std::string>& attention) {
    std::string heads;
    for (const std::string& head : attention)
        heads += concat(heads.empty() ? "" : ",", "\"", head, "\"");
    return concat(
        "{\"heads\":", layer.spec.n_head, ",\"window\":", layer.spec.window,
        ",\"sinks\":", layer.sinks.empty() ? "false" : "true", ",\"attention\":[", heads,
        "],\"norm\":", array_of(layer.norm), ",\"attentionNorm\":", array_of(layer.attention_norm),
        ",\"mlpNorm\":", array_of(layer.mlp_norm), ",\"experts\":", layer.spec.experts.n_expert,
        ",\"each\":", layer.spec.experts.n_expert_per_token,
        ",\"chosen\":", array_of(layer.experts), ",\"weights\":", array_of(layer.expert_weights),
        "}");
}

/// The page's data without attention, or with it.
std::string data_json(const LookPage& look, const AttentionText& attention) {
    std::string layers;
    for (size_t l = 0; l < look.inside.layers.size(); ++l)
        layers += (layers.empty() ? "" : ",\n") +
                  layer_json(look.inside.layers[l], l < attention.layers.size()
                                                        ? attention.layers[l]
                                                        : std::vector<std::string>{});
    return script_safe(concat("{\"tokens\":", tokens_json(look),
                              ",\n\"next\":", predictions_json(look.tokenizer, look.inside.next),
                              ",\n\"every\":", attention.every, ",\"floor\":", attention.floor,
                              ",\n\"norm\":", array_of(look.inside.norm), ",\n\"layers\":[", layers,
                              "]}"));
}

std::string mean_loss(const Inside& inside) {
    double sum = 0;
    int n = 0;
    for (const TokenInside& token : inside.tokens)
        if (std::isfinite(token.loss)) sum += token.loss, ++n;
    if (n == 0) return "";
    return concat("Mean loss of ", n, n == 1 ? " token: " : " tokens: ",
                  formatted("%.3f nats (perplexity %.4g).", sum / n, std::exp(sum / n)));
}

/// What the page leaves out of attention.
std::string left_out(const AttentionText& attention) {
    std::string text;
    if (attention.floor > 1)
        text += formatted(" Weights below %.2g %% are shown as 0, to keep the page small.",
                          100 * std::pow((attention.floor - 0.5) / attention_levels, 2));
    if (attention.every > 1)
        text += concat(" Of every ", attention.every, " heads the first is shown.");
    return text;
}

}  // namespace

std::string look_page(const LookPage& look) {
    std::map<std::string, std::string> texts = {
        {"title", html(look.name)},
        {"css", page_css},
        {"look_css", look_css},
        {"script", look_js},
        {"model", html(look.model)},
        {"loss", mean_loss(look.inside)},
        {"note",
         look.note.empty() ? "" : "<p class=\"notes\">" + html(sentence(look.note)) + "</p>"},
        {"left_out", ""},
        {"data", data_json(look, {})},
        {"version", html(version())},
        {"time", utc_time(std::time(nullptr))}};
    constexpr size_t reserve = 20'000;  // for what is left out, commas and quotes
    const size_t others = filled_page(look_html, texts).size() + reserve;
    const AttentionText attention =
        attention_text(look.inside, most_look_bytes - std::min(others, most_look_bytes));
    texts["left_out"] = left_out(attention);
    texts["data"] = data_json(look, attention);
    return filled_page(look_html, texts);
}

}  // namespace train_gpt
