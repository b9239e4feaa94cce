// Draws what a model computes of a text from the JSON in the page. One token is at hand, and all
// parts of the page show it.
'use strict';
(() => {
const data = JSON.parse(document.getElementById('data').textContent);
const {tokens, layers} = data, count = tokens.length;
const $ = id => document.getElementById(id);
const letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';
const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const percent = p => p >= 0.0995 ? (100 * p).toFixed(0) + ' %'
    : p >= 0.00095 ? (100 * p).toFixed(1) + ' %' : p > 0 ? '< 0.1 %' : '0 %';
const shown = text => text.replace(/\n/g, '↵').replace(/\t/g, '⇥')
    .replace(/^ +| +$/g, spaces => '␣'.repeat(spaces.length));
// Text stands on these colours, so the strongest is not the full colour: of text and ground it
// leaves a contrast of 4.5.
const dark = matchMedia('(prefers-color-scheme: dark)');
const fill = (colour, share) => `color-mix(in oklab, var(--${colour}) ` +
    `${Math.round((dark.matches ? 54 : 80) * Math.min(1, Math.max(0, share)))}%, transparent)`;

// ---- Attention ----------------------------------------------------------------------------------

const decoded = new Map();
/// The weights of a head: those of token t begin at row(layer, t), first the sink's, if the layer
/// has sinks.
function weightsOf(layer, place) {
    const key = layer + ' ' + place;
    if (decoded.has(key)) return decoded.get(key);
    const text = layers[layer].attention[place], weights = new Float32Array(row(layer, count));
    for (let i = 0, at = 0; i < text.length; ++i) {
        if (text[i] === '.') at += letters.indexOf(text[++i]) + 1;
        else weights[at++] = (letters.indexOf(text[i]) / 63) ** 2;
    }
    decoded.set(key, weights);
    return weights;
}
const row = (layer, t) => t * (t + 1) / 2 + (layers[layer].sinks ? t : 0);
/// What token t attends to in a head, or in the mean of the layer's heads: {sink, of: [weights of
/// tokens 0 … t]}.
function attention(layer, place, t) {
    const places = place < 0 ? layers[layer].attention.map((_, i) => i) : [place],
        sink = layers[layer].sinks ? 1 : 0;
    const of = new Float32Array(t + 1);
    let sunk = 0;
    for (const p of places) {
        const weights = weightsOf(layer, p), begin = row(layer, t);
        if (sink) sunk += weights[begin] / places.length;
        for (let s = 0; s <= t; ++s) of[s] += weights[begin + sink + s] / places.length;
    }
    return {sink: sunk, of};
}
const headName = place => place < 0 ? 'the mean of its heads' : 'head ' + place * data.every;

// ---- What is at hand ----------------------------------------------------------------------------

let at = Math.min(count - 1, Math.max(1, count >> 1)), held = false, layer = layers.length >> 1,
    head = -1, expert = null;

function texts() {
    for (const host of document.querySelectorAll('.text')) {
        tokens.forEach((token, i) => {
            const node = document.createElement('span');
            node.dataset.i = i;
            const special = token.loss === null && /^<.*>$/.test(token.text);
            node.className = special ? 'special' : '';
            node.textContent = special ? token.text + ' ' : token.text.replace(/\n/g, '↵\n');
            host.append(node);
        });
        host.tabIndex = 0;
        host.setAttribute('role', 'group');
        host.setAttribute('aria-label', 'The text; the arrow keys move to the next token');
        host.addEventListener('pointerover', event => {
            if (!held && event.target.dataset.i) choose(+event.target.dataset.i);
        });
        host.addEventListener('click', event => {
            if (!event.target.dataset.i) return;
            held = !(held && +event.target.dataset.i === at);
            choose(+event.target.dataset.i);
        });
    }
}
function paint(view, colour) {
    for (const node of document.querySelectorAll(`.text[data-view=${view}] span`)) {
        node.style.background = colour(+node.dataset.i);
        node.classList.toggle('at', +node.dataset.i === at);
        node.classList.toggle('held', held && +node.dataset.i === at);
    }
}

function expected() {
    const token = tokens[at], right = token.text;
    const rows = (list, mark) => '<table>' + list.map(([text, p]) =>
        `<tr${text === mark ? ' class="right"' : ''}><td>${escaped(shown(text))}</td>` +
        `<td><i class="bar" style="width:${100 * p}%"></i></td><td>${percent(p)}</td></tr>`)
        .join('') + '</table>';
    let text = `<p><b>${escaped(shown(right))}</b>, token ${at + 1} of ${count}</p>`;
    if (token.loss === null)
        text += '<p>Nothing stands before it, so that the model could not expect it.</p>';
    else text += `<p>Loss ${token.loss.toFixed(2)}: ` +
        `the model gave it ${percent(Math.exp(-token.loss))}. ` +
        (token.rank === 0 ? 'No other token was likelier.'
            : `${token.rank.toLocaleString('en-US')} ` +
                `other${token.rank === 1 ? ' was' : 's were'} likelier.`) +
        '</p>' + rows(token.expected, right);
    if (at === count - 1) text += '<p>After the text it expects</p>' + rows(data.next);
    $('expected').innerHTML = text;
}

function attended() {
    const {sink, of} = attention(layer, head, at), most = Math.max(...of);
    paint('attention', i => i <= at ? fill('c0', 0.9 * Math.sqrt(of[i] / (most || 1))) : '');
    const best = [...of.keys()].filter(s => of[s] > 0).sort((a, b) => of[b] - of[a]).slice(0, 6);
    $('attended').innerHTML = `Layer ${layer}, ${headName(head)}: ` +
        `<code>${escaped(shown(tokens[at].text))}</code> attends to ` +
        best.map(s => `<code>${escaped(shown(tokens[s].text))}</code> ` +
            `${s === at ? '(itself) ' : ''}${percent(of[s])}`).join(', ') +
        (layers[layer].sinks ? `; to nothing (its sink) ${percent(sink)}` : '') +
        (layers[layer].window
            ? `. This layer sees the last ${layers[layer].window} tokens` : '') + '.';
    map();
}
function map() {
    const canvas = $('map'), paper = canvas.getContext('2d', {willReadFrequently: true});
    canvas.width = canvas.height = count;
    const rgb = name => {  // a colour of the page as numbers
        paper.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        paper.fillRect(0, 0, 1, 1);
        return paper.getImageData(0, 0, 1, 1).data;
    };
    const low = rgb('--paper'), high = rgb('--c0'), mark = rgb('--tint'),
        image = paper.createImageData(count, count);
    for (let t = 0; t < count; ++t) {
        const {of} = attention(layer, head, t), most = Math.max(...of) || 1;
        for (let s = 0; s < count; ++s) {
            const share = s <= t ? Math.sqrt(of[s] / most) : 0,
                ground = t === at || s === at ? mark : low;
            for (let c = 0; c < 3; ++c)
                image.data[4 * (t * count + s) + c] = ground[c] + share * (high[c] - ground[c]);
            image.data[4 * (t * count + s) + 3] = 255;
        }
    }
    paper.putImageData(image, 0, 0);
}

function setLayer(to, toHead) {
    layer = to;
    head = Math.min(toHead, layers[layer].attention.length - 1);
    $('layer').value = layer;
    $('layer-name').textContent = `${layer} (of 0 to ${layers.length - 1})`;
    $('heads').innerHTML = layers[layer].attention.map((_, i) => i).reduce(
        (text, i) => text +
            `<button data-head="${i}" aria-pressed="${i === head}">${i * data.every}</button>`,
        `<button data-head="-1" aria-pressed="${head < 0}">mean</button>`);
    for (const cell of document.querySelectorAll('#all-heads rect'))
        cell.classList.toggle('at',
            +cell.dataset.layer === layer && +cell.dataset.place === head);
    attended();
}

/// A grid with a row for each layer: cells [{layer, place, share, name}].
function grid(host, cells, columns, colour, label) {
    const rows = [...new Set(cells.map(cell => cell.layer))], left = 44;
    const width = Math.max(260, host.clientWidth || 700),
        w = Math.min(44, Math.max(3, (width - left - 4) / columns)),
        h = Math.min(24, Math.max(5, 420 / rows.length));
    const every = Math.ceil(13 / h), across = Math.ceil(26 / w);
    host.innerHTML =
        `<svg viewBox="0 0 ${left + columns * w + 4} ${h * rows.length + 26}" ` +
        `style="width:${left + columns * w + 4}px" role="img" aria-label="${label}">` +
        rows.map((l, r) => r % every ? '' : `<text x="${left - 8}" y="${r * h + h / 2 + 4}" ` +
            `text-anchor="end">${l}</text>`).join('') +
        Array.from({length: columns}, (_, c) => c % across ? ''
            : `<text x="${left + (c + 0.5) * w}" y="${h * rows.length + 16}" ` +
                `text-anchor="middle">${c * (label === 'Heads' ? data.every : 1)}</text>`)
            .join('') +
        cells.map(cell => `<rect data-layer="${cell.layer}" data-place="${cell.place}" ` +
            `x="${left + cell.place * w + 1}" y="${rows.indexOf(cell.layer) * h + 1}" ` +
            `width="${w - 1.5}" height="${h - 1.5}" style="fill:` +
            (cell.share > 0
                ? `color-mix(in oklab, var(--${colour}) ` +
                    `${Math.round(100 * Math.min(1, cell.share))}%, var(--tint))`
                : 'var(--tint)') +
            `"><title>${cell.name}</title></rect>`).join('') + '</svg>';
}
function allHeads() {
    const cells = [];
    layers.forEach(({attention: heads}, l) => heads.forEach((_, place) => {
        let sum = 0;
        for (let t = 1; t < count; ++t)
            attention(l, place, t).of.forEach((p, s) => { sum += p * (t - s) / t; });
        const far = count > 1 ? sum / (count - 1) : 0;
        cells.push({layer: l, place, share: far,
            name: `layer ${l}, head ${place * data.every}: ${percent(far)} of the way back`});
    }));
    grid($('all-heads'), cells, Math.max(...layers.map(l => l.attention.length)), 'c0', 'Heads');
}

// ---- The residual stream ------------------------------------------------------------------------

const norms = t => [...layers.map(l => l.norm[t]), data.norm[t]];
function stream() {
    const host = $('norms'), width = Math.max(260, host.clientWidth || 700), height = 300,
        left = 54, right = width - 10, top = 10, base = height - 34;
    const lines = [
        ['c0', 'the stream before a layer; the last point is after all of them',
            norms(at).map((y, l) => [l, y])],
        ['c1', 'what attention adds', layers.map((l, i) => [i, l.attentionNorm[at]])],
        ['c2', layers.some(l => l.experts) ? 'what the MLP or the experts add'
            : 'what the MLP adds', layers.map((l, i) => [i, l.mlpNorm[at]])]];
    const all = [...lines.flatMap(([, , points]) => points.map(([, y]) => y)),
        ...tokens.flatMap((_, t) => norms(t))].filter(y => y > 0);
    const low = Math.log10(Math.min(...all)) - 0.05, high = Math.log10(Math.max(...all)) + 0.05;
    const px = l => left + l / layers.length * (right - left),
        py = y => base - (Math.log10(Math.max(y, 10 ** low)) - low) / (high - low) * (base - top);
    const path = points => 'M' +
            points.map(([x, y]) => px(x).toFixed(1) + ' ' + py(y).toFixed(1)).join('L'),
        parts = [];
    for (let power = Math.ceil(low - 1); power <= high; ++power)
        for (const f of high - low < 1.2 ? [1, 2, 5] : [1]) {
            const y = f * 10 ** power;
            if (Math.log10(y) >= low && Math.log10(y) <= high)
                parts.push(
                    `<line class="grid" x1="${left}" x2="${right}" y1="${py(y)}" y2="${py(y)}"/>` +
                    `<text x="${left - 8}" y="${py(y) + 4}" text-anchor="end">` +
                    `${+y.toPrecision(3)}</text>`);
        }
    const every = Math.ceil(layers.length / (width / 60));
    for (let l = 0; l <= layers.length; l += every)
        parts.push(`<text x="${px(l)}" y="${base + 17}" text-anchor="middle">${l}</text>`);
    parts.push(`<line class="base" x1="${left}" x2="${right}" y1="${base}" y2="${base}"/>` +
        `<text x="${right}" y="${base + 32}" text-anchor="end">layer</text>`);
    tokens.forEach((_, t) => {
        if (t !== at)
            parts.push(`<path class="line all" d="${path(norms(t).map((y, l) => [l, y]))}"/>`);
    });
    for (const [colour, name, points] of lines)
        parts.push(`<path class="line mean ${colour}" data-line="${name}" d="${path(points)}"/>`);
    host.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Norms">` +
        `${parts.join('')}</svg>`;
    $('stream-legend').innerHTML = lines.map(([colour, name]) =>
        `<span><svg viewBox="0 0 26 10"><path class="line mean ${colour}" d="M0 5H26"/></svg>` +
        `${name}</span>`).join('') +
        '<span><svg viewBox="0 0 26 10">' +
        '<path class="line" style="stroke:var(--soft);opacity:.4" d="M0 5H26"/></svg>' +
        'the stream of the other tokens</span>';
}

// ---- The router ---------------------------------------------------------------------------------

const mixtures = layers.map((of, l) => ({...of, l})).filter(of => of.experts);
const routesOf = (of, t) => of.chosen.slice(t * of.each, (t + 1) * of.each)
    .map((e, i) => [e, of.weights[t * of.each + i]]);
function allExperts() {
    const cells = mixtures.flatMap(of => {
        const got = new Array(of.experts).fill(0);
        for (const e of of.chosen) ++got[e];
        return got.map((n, e) => ({layer: of.l, place: e, share: Math.sqrt(n / Math.max(...got)),
            name: `layer ${of.l}, expert ${e}: ${n} of ${count} tokens`}));
    });
    grid($('all-experts'), cells, Math.max(...mixtures.map(of => of.experts)), 'c2', 'Experts');
}
function routed() {
    if (!mixtures.length) return;
    for (const of of mixtures) {
        const chosen = new Map(routesOf(of, at));
        for (const cell of document.querySelectorAll(`#all-experts rect[data-layer="${of.l}"]`))
            cell.classList.toggle('at', chosen.has(+cell.dataset.place));
    }
    const of = mixtures.find(one => expert && one.l === expert[0]);
    paint('expert', t => of
        ? fill('c2', 0.9 * (routesOf(of, t).find(([e]) => e === expert[1])?.[1] ?? 0)) : '');
    const first = of ?? mixtures[mixtures.length >> 1];
    $('routed').innerHTML = (of
        ? `Coloured: the tokens that layer ${of.l} sends to expert ${expert[1]}, ` +
            'by the weight that it gets. '
        : '') +
        `Layer ${first.l} sends <code>${escaped(shown(tokens[at].text))}</code> to ` +
        routesOf(first, at).map(([e, w]) => `expert ${e} (weight ${w.toFixed(2)})`).join(', ') +
        '.';
}

// ---- The page -----------------------------------------------------------------------------------

function choose(i) {
    at = i;
    paint('loss', t => tokens[t].loss === null ? '' : fill('c1', tokens[t].loss / 10));
    expected();
    attended();
    stream();
    routed();
}

function scale() {
    document.querySelector('.scale').innerHTML = [0, 2, 4, 6, 8, 10].map(loss =>
        `<span><i style="background:${fill('c1', loss / 10)}"></i>` +
        `${loss === 10 ? '10 and more' : loss}</span>`).join('') + '<span>nats</span>';
}
scale();
texts();
$('layer').max = layers.length - 1;
$('layer').addEventListener('input', () => setLayer(+$('layer').value, head));
$('heads').addEventListener('click', event => {
    if (event.target.dataset.head) setLayer(layer, +event.target.dataset.head);
});
$('all-heads').addEventListener('click', event => {
    if (event.target.dataset.layer)
        setLayer(+event.target.dataset.layer, +event.target.dataset.place);
});
$('map').addEventListener('pointermove', event => {
    const box = $('map').getBoundingClientRect(),
        t = Math.floor((event.clientY - box.top) / box.height * count);
    if (!held && t >= 0 && t < count && t !== at) choose(t);
});
addEventListener('keydown', event => {
    // The browser's: keys with a modifier, and those for a slider or for what scrolls sideways.
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey ||
        event.target.closest?.('input, .grid-map')) return;
    if (!(at + move >= 0 && at + move < count)) return;
    event.preventDefault();
    held = true;
    choose(at + move);
});
$('routers').hidden = !mixtures.length;
if (mixtures.length) $('all-experts').addEventListener('pointerover', event => {
    if (!event.target.dataset.layer) return;
    expert = [+event.target.dataset.layer, +event.target.dataset.place];
    routed();
});
let width = 0;
new ResizeObserver(() => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    allHeads();
    if (mixtures.length) allExperts();
    setLayer(layer, head);
    choose(at);
}).observe(document.body);
dark.addEventListener('change', () => { scale(); choose(at); });
allHeads();
if (mixtures.length) allExperts();
setLayer(layer, head);
choose(at);
})();
