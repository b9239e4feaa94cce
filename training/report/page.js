// Draws the plots of a report from the JSON in the page. A plot is a list of entries: curves of a run
// with the way they are drawn. All plots share the horizontal axis and what is zoomed into.
'use strict';
(() => {
const {runs, stamp} = JSON.parse(document.getElementById('data').textContent);
const several = runs.length > 1;
const phases = ['compute', 'communication', 'data wait', 'optimizer'];

// ---- The data -------------------------------------------------------------------------------------

for (const run of runs) {
    run.shown = true;
    for (const curve of Object.values(run.curves)) {
        let step = 0;
        curve.x = curve.x.map(difference => step += difference);
    }
}
const sources = [...new Set(runs.flatMap(run => Object.keys(run.curves)))]
    .filter(name => name.startsWith('loss/')).map(name => name.slice(5));

/// The names of tasks, and of CORE.
const scored = [...new Set(runs.flatMap(run => Object.keys(run.curves)))]
    .filter(name => /^(task|core)\//.test(name) && !/\/(low|high)$/.test(name)).sort();

/// The index of the value nearest to x in rising values.
function nearest(values, x) {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (values[middle] < x) low = middle; else high = middle;
    }
    return x - values[low] <= values[high] - x ? low : high;
}

/// A curve's value at a step: between two points, and after the last one, linear.
function along({x, y}, step) {
    if (x.length < 2 || step <= x[0]) return y[0];
    let i = nearest(x, step);
    if (x[i] < step && i + 1 < x.length || i === 0) ++i;
    return y[i - 1] + (step - x[i - 1]) / (x[i] - x[i - 1]) * (y[i] - y[i - 1]);
}

/// A run of less than three hours is measured in minutes.
const unitOfTime = Math.max(0, ...runs.map(run => run.curves.seconds ? run.curves.seconds.y[run.curves.seconds.y.length - 1] : 0)) < 3 * 3600
    ? {name: 'minutes', seconds: 60} : {name: 'hours', seconds: 3600};
const axes = {
    step: {label: 'step', at: (run, step) => step},
    tokens: {label: 'tokens', at: (run, step) => along(run.curves.tokens, step)},
    hours: {label: unitOfTime.name + ' of training', at: (run, step) => along(run.curves.seconds, step) / unitOfTime.seconds},
};
let axis = 'step', view = null;  // view: [first, last] on the axis; null: everything

// ---- Numbers --------------------------------------------------------------------------------------

const grouped = value => Math.round(value).toLocaleString('en-US');
const percent = value => (100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0) + ' %';
function short(value) {
    const size = Math.abs(value);
    for (const [unit, name] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e4, 'k']])
        if (size >= unit) return String(+(value / (name === 'k' ? 1e3 : unit)).toPrecision(4)) + name;
    return size > 0 && size < 1e-3 ? value.toExponential().replace(/\.?0+e/, 'e').replace('e-', 'e−') : String(+value.toPrecision(6));
}
const exponential = value => value ? value.toExponential().replace('e-', 'e−') : '0';
function bytes(value) {
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
    let unit = 0;
    for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
    return value.toPrecision(unit && value < 1000 ? 3 : 4) + ' ' + units[unit];
}
function duration(seconds) {
    const s = Math.round(seconds), two = n => String(n).padStart(2, '0');
    return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)} h` : `${Math.floor(s / 60)}:${two(s % 60)} min`;
}
const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

function ticks(low, high, most) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough * (1 - 1e-9));
    const all = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-12 * step; ++i) all.push(+(i * step).toPrecision(12));
    return all;
}
function logTicks(low, high) {
    for (const factors of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
        const all = [];
        for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power)
            for (const f of factors) if (f * 10 ** power >= low && f * 10 ** power <= high) all.push(+(f * 10 ** power).toPrecision(3));
        if (all.length >= 3) return all;
    }
    return ticks(low, high, 4);
}

// ---- What is plotted --------------------------------------------------------------------------------

/// Entries of a curve in all runs that have it.
const curve = (name, style, label, options = {}) => runs.flatMap((run, r) => run.curves[name]
    ? [{...options, run, name, style, what: label, colour: 'c' + (several ? r : options.colour ?? 0), curve: run.curves[name]}] : []);
const fixed = digits => value => value.toFixed(digits);
const known = [...new Set(runs.map(run => run.vocabulary).filter(n => n > 0))];
const ignorance = known.length === 1 ? ` A model that knows nothing would be at ${Math.log(known[0]).toFixed(2)}.` : '';

const plots = [
    {id: 'loss', title: 'Loss', unit: 'nats per token', full: true, height: 340, format: fixed(4), crops: true,
        entries: [...curve('loss', 'thin', 'training, each step'), ...curve('loss_mean', 'mean', 'training, running mean'),
            ...curve('val_loss', 'dots', 'validation', {colour: 1})],
        good: 'Good: it falls steeply, then ever more slowly, and validation follows training. If validation turns up while training ' +
            'still falls, the model has begun to learn its text by heart. If all of it jumps up and stays there, training has diverged.' + ignorance},
    ...(several ? sources.map(source => ({id: 'loss/' + source, title: 'Loss on ' + source, unit: 'nats per token', format: fixed(4), crops: true,
        entries: [...curve('loss/' + source, 'thin', 'each step'), ...curve('loss_mean/' + source, 'mean', 'running mean')],
        good: 'Good: it falls as the loss as a whole does. Sources differ in level, since some texts are easier to predict.'}))
        : [{id: 'sources', title: 'Loss by source', unit: 'nats per token', full: true, height: 300, format: fixed(4), crops: true,
            entries: sources.flatMap((source, s) => [...curve('loss/' + source, 'thin', source, {colour: s % 12, silent: true}),
                ...curve('loss_mean/' + source, 'mean', source, {colour: s % 12})]),
            good: 'Good: every source falls. Levels differ, since some texts are easier to predict; a source that stops falling while others ' +
                'do not may be too small and read too often.'}]),
    {id: 'rate', title: 'Learning rate', format: value => exponential(+value.toPrecision(4)), tick: exponential, zero: true, entries: curve('learning_rate', 'line', 'learning rate'),
        good: 'How far each step moves the weights. It is planned, not measured: a short rise, then the fall that the schedule asks for.'},
    {id: 'norm', title: 'Gradient norm', format: value => value.toPrecision(4), log: true,
        entries: [...curve('grad_norm', 'thin', 'each step'), ...curve('grad_norm_mean', 'mean', 'running mean')],
        limit: {of: run => run.clip, label: 'clipped above'},
        good: 'Good: after the first steps it stays within a band. Single spikes are harmless, since they are clipped; a level that keeps ' +
            'rising often comes before a loss that jumps up.'},
    {id: 'speed', title: 'Throughput', unit: 'tokens per second', format: grouped, zero: true,
        entries: [...curve('tokens_per_second', 'thin', 'each step'), ...curve('tokens_per_second_mean', 'mean', 'running mean')],
        limit: {of: run => run.limit, label: several ? 'limit of each run' : `limit: ${grouped(runs[0].limit)}`},
        good: 'Good: flat, and near its limit, which is the rate at which this machine multiplies matrices and nothing else. Dips are waiting: ' +
            'for data, for other ranks, or for other programs.'},
    {id: 'experts', title: 'Busiest expert', unit: 'load, as a multiple of the mean', format: fixed(2),
        entries: [...curve('router_load', 'thin', 'each step'), ...curve('router_load_mean', 'mean', 'running mean')],
        good: 'How often a step chose the expert that it chose most often, of all layers. Good: it falls towards 1 and stays there. If it rises ' +
            'and stays high, a router sends most tokens to few experts, and the others learn little.'},
    {id: 'idle', title: 'Idle experts', unit: 'experts, of all layers', format: fixed(0), zero: true,
        entries: [...curve('router_idle', 'thin', 'each step'), ...curve('router_idle_mean', 'mean', 'running mean')],
        good: 'Experts that a step chose for none of its tokens. Good: none after the first steps. What never gets a token never learns.'},
    {id: 'bits', title: 'Validation loss per byte', unit: 'bits per byte of text', format: fixed(4), entries: curve('val_bits_per_byte', 'dots', 'validation', {colour: 1}),
        good: 'The same validation loss for each byte of text, so that models with different tokenizers can be compared. Lower ' +
            'is better: it is the size to which the model could compress the text.'},
    {id: 'hellaswag', title: 'HellaSwag', unit: 'accuracy', format: percent, tick: percent,
        entries: [...curve('hellaswag', 'dots', 'accuracy'), ...curve('hellaswag_normalised', 'dots', 'normalised by length', {colour: 1})],
        good: 'How often the model picks the right one of four endings of a sentence. Guessing gives 25 %; it rises late and slowly.'},
    ...scored.map(name => ({id: name, title: name.startsWith('core/') ? `CORE, baselines ${name.slice(5)}` : 'Task ' + name.slice(5),
        unit: name.startsWith('core/') ? 'mean centered accuracy' : 'accuracy', format: percent, tick: percent,
        entries: [...curve(name + '/low', 'edge', 'less a standard error', {silent: true}), ...curve(name + '/high', 'edge', 'plus a standard error', {silent: true}),
            ...curve(name, 'dots', name.startsWith('core/') ? 'CORE' : 'accuracy')],
        bands: runs.flatMap(run => run.curves[name + '/low'] ? [{run, low: name + '/low', high: name + '/high'}] : []),
        good: name === scored[0] ? 'The band is one standard error of the items to each side: changes within it are noise. Small models guess at many tasks for a ' +
            'long time.' : ''})),
    ...runs.map((run, r) => ({id: 'time/' + r, title: several ? 'Where the time goes: ' + run.name : 'Where the time goes', shares: run.shares && run,
        format: percent, tick: percent, entries: [],
        good: r > 0 ? '' : 'Good: nearly all of it computes. Communication counts only where computing waits for it, and data wait is time in which the ' +
            'next batch was not ready: it should be none.'})),
];

// ---- One plot ---------------------------------------------------------------------------------------

const inset = {left: 54, right: 10, top: 22, bottom: 34};

/// The x of an entry's points on the current axis; kept, since a plot is redrawn often.
function xs(entry) {
    const at = axes[axis].at;
    if (entry.axis !== axis) { entry.x = entry.curve.x.map(step => at(entry.run, step)); entry.axis = axis; }
    return entry.x;
}
const visible = plot => plot.entries.filter(entry => entry.run.shown);

function horizontal() {
    if (view) return view;
    let last = 0;
    for (const run of runs) if (run.shown)
        for (const {x} of Object.values(run.curves)) last = Math.max(last, axes[axis].at(run, x[x.length - 1]));
    return [0, last || 1];
}

/// The lowest and the highest value that a plot shows, and the highest one that there is.
function vertical(plot, [first, last]) {
    if (plot.shares) return [0, 1, 1];
    let low = Infinity, high = -Infinity;
    const include = value => { if (value > 0 || !plot.log) { low = Math.min(low, value); high = Math.max(high, value); } };
    for (const entry of visible(plot)) {
        const x = xs(entry);
        entry.curve.y.forEach((y, i) => { if (x[i] >= first && x[i] <= last) include(y); });
    }
    if (plot.limit) for (const entry of visible(plot)) if (plot.limit.of(entry.run) > 0) include(plot.limit.of(entry.run));
    if (low > high) return plot.log ? [0.1, 1, 1] : [0, 1, 1];
    if (plot.log) return [low / 1.15, high * 1.15, high];
    if (plot.zero) return [0, high * 1.06 || 1, high];
    const most = plot.crops && !view ? cropped(plot, [first, last], [low, high]) : high;
    const margin = (most - low) * 0.05 || Math.abs(most) * 0.05 || 1;
    return [low - margin, most + margin, high];
}

/// The highest value to show of a whole run. A run's first losses are so much higher than all others that these would be squeezed together, and so
/// may single losses be anywhere, of 10^7 say. The top of the first 3 % is left out, and what is far above 98 of 100 values.
function cropped(plot, [first, last], [low, high]) {
    const from = first + 0.03 * (last - first);
    let usual = -Infinity, most = -Infinity;
    for (const entry of visible(plot)) {
        if (entry.style === 'mean') continue;  // near a high loss the mean is high too
        const x = xs(entry), values = entry.curve.y.filter((y, i) => x[i] >= from).sort((a, b) => a - b);
        if (!values.length) continue;
        // The share of high losses is that of the run's steps, since a drawn curve keeps all high ones.
        usual = Math.max(usual, entry.run.usual[entry.name] ?? values[Math.floor(0.98 * (values.length - 1))]);
        most = Math.max(most, values[values.length - 1]);
    }
    if (most < low) return high;
    const cap = most - low > 4 * (usual - low) && usual > low ? usual + 0.5 * (usual - low) : most;
    return cap > low && cap - low < 0.35 * (high - low) ? cap + 0.05 * (cap - low) : high;
}

function draw(plot) {
    const width = Math.max(260, plot.host.clientWidth || 700), height = plot.height || 240;
    const [x0, x1] = horizontal(), [y0, y1, top] = vertical(plot, [x0, x1]);
    const right = width - inset.right, base = height - inset.bottom;
    const level = plot.log ? Math.log : value => value;
    const px = x => inset.left + (x - x0) / (x1 - x0) * (right - inset.left);
    const py = y => base - (level(y) - level(y0)) / (level(y1) - level(y0)) * (base - inset.top);
    Object.assign(plot, {width, x0, x1, y0, y1, px, right});

    const parts = [];
    for (const y of plot.log ? logTicks(y0, y1) : ticks(y0, y1, height > 300 ? 7 : 4))
        parts.push(`<line class="grid" x1="${inset.left}" x2="${right}" y1="${py(y)}" y2="${py(y)}"/>` +
            `<text x="${inset.left - 8}" y="${py(y) + 4}" text-anchor="end">${(plot.tick ?? short)(y)}</text>`);
    for (const x of ticks(x0, x1, Math.max(2, width / 110))) {
        const label = short(x), over = px(x) + label.length * 3.6 > width;  // the page's edge
        parts.push(`<text x="${over ? width : px(x)}" y="${base + 17}" text-anchor="${over ? 'end' : 'middle'}">${label}</text>`);
    }
    parts.push(`<line class="base" x1="${inset.left}" x2="${right}" y1="${base}" y2="${base}"/>`,
        `<text x="${right}" y="${base + 32}" text-anchor="end">${axes[axis].label}</text>`);
    const unit = [plot.unit, plot.log ? 'logarithmic axis' : '', y1 < top ? `some are higher, up to ${short(+top.toPrecision(2))}` : ''].filter(Boolean).join('; ');
    if (unit) parts.push(`<text class="unit" x="0" y="11">${unit}</text>`);
    parts.push(`<g clip-path="url(#clip-${plot.number})">`, plot.shares ? areas(plot, px, py) : lines(plot, px, py), '</g>');
    parts.push(marks(plot, px, base));
    plot.host.querySelector('svg')?.remove();
    plot.host.insertAdjacentHTML('afterbegin',
        `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${escaped(plot.title)}" data-plot="${escaped(plot.id)}" ` +
        `data-domain="${[x0, x1, y0, y1].join(' ')}" data-top="${top}" data-area="${[inset.left, right, base, inset.top].join(' ')}" data-log="${plot.log ? 1 : 0}">` +
        `<clipPath id="clip-${plot.number}"><rect x="${inset.left - 5}" y="${inset.top - 6}" width="${right - inset.left + 10}" height="${base - inset.top + 7}"/></clipPath>` +
        parts.join('') + `<line class="cross" y1="${inset.top - 6}" y2="${base}" visibility="hidden"/>` +
        `<rect class="zoom" y="${inset.top - 6}" height="${base - inset.top + 6}" visibility="hidden"/></svg>`);
}

function lines(plot, px, py) {
    let text = '';
    const round = value => value.toFixed(2);
    for (const {run, low, high} of plot.bands ?? []) {
        if (!run.shown) continue;
        const [below, above] = [low, high].map(name => visible(plot).find(entry => entry.run === run && entry.name === name));
        const edge = entry => entry.curve.y.map((value, i) => round(px(xs(entry)[i])) + ' ' + round(py(value)));
        text += `<path class="band ${above.colour}" data-band="${escaped(low.replace(/\/low$/, ''))}" d="M${[...edge(above), ...edge(below).reverse()].join('L')}Z"/>`;
    }
    for (const entry of visible(plot)) {
        if (entry.style === 'edge') continue;
        const x = xs(entry), y = entry.curve.y;
        const points = y.map((value, i) => round(px(x[i])) + ' ' + round(py(Math.max(value, plot.log ? plot.y0 : -Infinity))));
        const names = `data-run="${runs.indexOf(entry.run)}" data-curve="${escaped(entry.name)}"`;
        text += `<path class="line ${entry.style} ${entry.colour}" ${names} d="M${points.join('L')}"/>`;
        if (entry.style === 'dots' || points.length === 1)
            text += points.map(p => `<circle class="dot ${entry.colour}" cx="${p.split(' ')[0]}" cy="${p.split(' ')[1]}" r="${points.length > 60 ? 2 : 3.5}"/>`).join('');
    }
    if (plot.limit) for (const run of new Set(visible(plot).map(entry => entry.run))) {
        const limit = plot.limit.of(run);
        if (limit > 0) text += `<path class="line dashed c${several ? runs.indexOf(run) : 0}" data-limit="${limit}" d="M${inset.left} ${py(limit)}H${plot.right}"/>`;
    }
    return text;
}

function areas(plot, px, py) {
    const run = plot.shares, {x} = run.shares, at = axes[axis].at;
    const edges = x.map(step => px(at(run, step)).toFixed(2));
    let text = '', below = edges.slice(1).map(() => 0);
    phases.forEach((phase, p) => {
        const above = run.shares[phase].map((share, i) => below[i] + share);
        const top = above.map((y, i) => `L${edges[i]} ${py(Math.min(y, 1)).toFixed(2)}H${edges[i + 1]}`).join('');
        const bottom = below.map((y, i) => `L${edges[i + 1]} ${py(y).toFixed(2)}H${edges[i]}`).reverse().join('');
        text += `<path class="area p${p}" d="M${(top + bottom).slice(1)}Z"/>`;
        below = above;
    });
    return text;
}

/// Where runs stopped or resumed.
const marksOf = plot => runs.flatMap((run, r) => run.shown && (!plot.shares || plot.shares === run)
    ? run.marks.map(([step, text]) => ({x: axes[axis].at(run, step), r, text: (several ? run.name + ': ' : '') + text})) : []);
function marks(plot, px, base) {
    const all = marksOf(plot).filter(({x}) => x >= plot.x0 && x <= plot.x1);
    const named = plot.full && !several && all.length < 3;
    return all.map(({x, r, text}, i) => {
        // The text is on the side that has more room, up to the next mark, and is cut where it does not fit.
        const left = px(x) - (i > 0 ? px(all[i - 1].x) : inset.left), right = (i + 1 < all.length ? px(all[i + 1].x) : plot.right) - px(x);
        const most = Math.floor((Math.max(left, right) - 8) / 6.6), shownText = text.length > most ? text.slice(0, Math.max(0, most - 1)) + '…' : text;
        return `<g><title>${escaped(text)}</title><line class="mark" x1="${px(x)}" x2="${px(x)}" y1="${inset.top}" y2="${base}"/>` +
            `<path class="${several ? 'dot c' + r : 'flag'}" d="M${px(x)} ${base - 7}l4 7h-8z"/>` +
            (named && most > 3 ? `<text class="mark-text" x="${px(x) + (right >= left ? 5 : -5)}" y="${inset.top + 6}" text-anchor="${right >= left ? 'start' : 'end'}">` +
                `${escaped(shownText)}</text>` : '') + '</g>';
    }).join('');
}

// ---- Values under the pointer -------------------------------------------------------------------------

function tip(plot, x) {
    const place = (run, step) => [`step ${grouped(step)}`, run.curves.tokens ? short(along(run.curves.tokens, step)) + ' tokens' : '',
        run.curves.seconds ? duration(along(run.curves.seconds, step)) : ''].filter(Boolean).join(' · ');
    const rows = [];
    let head = '';
    const row = (colour, label, value) => rows.push(`<tr><td><i class="swatch ${colour}"></i>${escaped(label)}</td><td>${value}</td></tr>`);
    if (plot.shares) {
        const run = plot.shares, ends = run.shares.x.map(step => axes[axis].at(run, step));
        const found = ends.findIndex(end => end >= x), i = found < 0 ? ends.length - 1 : Math.max(1, found);
        head = place(run, run.shares.x[i]);
        phases.forEach((phase, p) => row('p' + p, phase, percent(run.shares[phase][i - 1])));
        const groups = Object.entries(run.shares.groups);
        if (groups.length > 1) groups.forEach(([group, shares]) => row('p1', `waiting along ${group}`, percent(shares[i - 1])));
    }
    for (const entry of visible(plot)) {
        const all = xs(entry), i = nearest(all, x);
        head = head || place(entry.run, entry.curve.x[i]);
        if (entry.silent || several && entry.style !== 'mean' && visible(plot).some(other => other.run === entry.run && other.style === 'mean')) continue;
        const value = entry.curve.y[i];
        let text = plot.format(value);
        if (entry.style === 'dots') text += ` <span class="swatch"></span>at step ${grouped(entry.curve.x[i])}`;
        if (entry.name.startsWith('tokens_per_second') && entry.run.limit > 0) text += `, ${percent(value / entry.run.limit)} of the limit`;
        row(entry.colour, several ? `${entry.run.name}, ${entry.what}` : entry.what, text);
    }
    for (const mark of marksOf(plot))
        if (Math.abs(plot.px(mark.x) - plot.px(x)) < 6) rows.push(`<tr><td colspan="2">${escaped(mark.text)}</td></tr>`);
    return `<b>${head}</b><table>${rows.join('')}</table>`;
}

/// Shows the values at a pixel of a plot, and where that is in the others.
function point(plot, pixel) {
    const x = plot.x0 + (pixel - inset.left) / (plot.right - inset.left) * (plot.x1 - plot.x0);
    for (const other of plots) {
        const cross = other.host?.querySelector('.cross');
        if (!cross) continue;
        const at = other.px(x).toFixed(1);
        cross.setAttribute('x1', at);
        cross.setAttribute('x2', at);
        cross.setAttribute('visibility', x >= other.x0 && x <= other.x1 ? 'visible' : 'hidden');
    }
    const box = plot.tip;
    box.hidden = false;
    box.innerHTML = tip(plot, x);
    const left = pixel + 14 + box.offsetWidth > plot.width ? pixel - 14 - box.offsetWidth : pixel + 14;
    box.style.left = Math.max(0, left) + 'px';
    box.style.top = inset.top + 6 + 'px';
}
function leave(plot) {
    plot.tip.hidden = true;
    for (const cross of document.querySelectorAll('.cross')) cross.setAttribute('visibility', 'hidden');
}

function listen(plot) {
    let from = null;
    const pixel = event => {
        const box = plot.host.getBoundingClientRect();
        return Math.min(plot.right, Math.max(inset.left, (event.clientX - box.left) * plot.width / box.width));
    };
    const band = to => {
        const zoom = plot.host.querySelector('.zoom');
        zoom.setAttribute('visibility', to === null ? 'hidden' : 'visible');
        if (to === null) return;
        zoom.setAttribute('x', Math.min(from, to));
        zoom.setAttribute('width', Math.abs(to - from));
    };
    plot.host.addEventListener('pointerdown', event => { if (event.button === 0) from = pixel(event); });
    plot.host.addEventListener('pointermove', event => {
        point(plot, pixel(event));
        if (from !== null) band(pixel(event));
    });
    plot.host.addEventListener('pointerleave', () => leave(plot));
    plot.host.addEventListener('pointercancel', () => { from = null; band(null); leave(plot); });
    addEventListener('pointerup', event => {
        if (from === null) return;
        const to = pixel(event), start = from;
        band(null);
        from = null;
        if (Math.abs(to - start) < 6) return;
        const value = at => plot.x0 + (at - inset.left) / (plot.right - inset.left) * (plot.x1 - plot.x0);
        zoomTo([value(Math.min(start, to)), value(Math.max(start, to))]);
    });
    plot.host.addEventListener('dblclick', () => zoomTo(null));
}

// ---- The page -----------------------------------------------------------------------------------------

const dash = style => style === 'dashed' ? ' dashed' : style === 'thin' ? ' thin' : style === 'mean' ? ' mean' : '';
function legend(plot) {
    const item = (drawing, label) => `<span><svg viewBox="0 0 26 10">${drawing}</svg>${escaped(label)}</span>`;
    if (plot.shares) return phases.map((phase, p) => item(`<rect class="area p${p}" width="26" height="10"/>`, phase)).join('');
    const seen = new Map();
    for (const entry of plot.entries) if (!entry.silent && !seen.has(entry.what)) seen.set(entry.what, entry);
    let text = '';
    if (seen.size > 1) for (const [label, entry] of seen)
        text += item(`<path class="line${dash(entry.style)} ${several ? '' : entry.colour}" ${several ? 'style="--c:var(--soft)"' : ''} d="M0 5H26"/>` +
            (entry.style === 'dots' ? `<circle class="dot ${several ? '' : entry.colour}" ${several ? 'style="--c:var(--soft)"' : ''} cx="13" cy="5" r="3.5"/>` : ''), label);
    if (plot.limit && plot.entries.some(entry => plot.limit.of(entry.run) > 0))
        text += item(`<path class="line dashed ${several ? '' : 'c0'}" ${several ? 'style="--c:var(--soft)"' : ''} d="M0 5H26"/>`, plot.limit.label);
    return text;
}

/// first: above the summary.
function section(title, good, full, first) {
    const node = document.createElement('section');
    node.className = full ? 'full' : '';
    node.innerHTML = `<div class="head"><h2>${escaped(title)}</h2><p class="good">${escaped(good)}</p></div>`;
    document.getElementById(first ? 'first' : 'plots').append(node);
    return node;
}

function memory() {
    const purposes = [...new Set(runs.flatMap(run => run.memory.map(([purpose]) => purpose)))];
    if (!purposes.length) return;
    const node = section('Memory', 'What one rank has allocated, by purpose. All of it is allocated before the first step and never grows, so that a run ' +
        'whose first step fits does not run out of memory later.', runs.length > 3);
    const of = (run, purpose) => run.memory.find(([name]) => name === purpose)?.[1] ?? 0;
    const names = {kv_cache: 'key-value cache', masters: 'fp32 weights', parameters: 'weights', moments: 'optimizer’s moments', staging: 'host buffers'};
    const total = run => run.memory.reduce((sum, [, size]) => sum + size, 0);
    const most = Math.max(...purposes.flatMap(purpose => runs.map(run => of(run, purpose))));
    node.insertAdjacentHTML('beforeend', '<div class="bars">' + purposes.map(purpose =>
        `<span>${escaped(names[purpose] ?? purpose)}</span><div class="${several ? 'several' : ''}">` +
        runs.map((run, r) => `<i class="c${r}" style="width:${100 * of(run, purpose) / most}%"></i>`).join('') + '</div>' +
        `<span class="figures">${runs.map(run => bytes(of(run, purpose))).join('<br>')}</span>`).join('') +
        `<span class="total">total</span><div></div><span class="figures total">${runs.map(run => bytes(total(run))).join('<br>')}</span></div>`);
}

// ---- The load of experts --------------------------------------------------------------------------------

/// Letter n of a load stands for 0 or for 2^((n − 32) / 6) times the mean (router_picture.h).
const letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_';
const loadOf = level => level ? 2 ** ((level - 32) / 6) : 0;
/// Above the mean in one colour, below it in another; full at 8 times and at an eighth. Idle experts stand out.
const heat = level => level ? `color-mix(in oklab, var(${level > 32 ? '--c1' : '--c0'}) ${Math.min(100, Math.round(100 * Math.abs(level - 32) / 18))}%, var(--tint))` : 'var(--ink)';

function loads(run, first) {
    const {layers, experts, steps, load} = run.routers;
    const node = section(several ? 'Load of experts: ' + run.name : 'Load of experts', !first ? '' :
        'How often each expert of each layer was chosen in a step. Good: near the mean everywhere, in the last steps too. A layer that stays orange in a ' +
        'few places and blue or empty in all others has collapsed: few experts get the tokens, and the others learn little.', true);
    const item = (level, label) => `<span><svg viewBox="0 0 26 10"><rect style="fill:${heat(level)}" width="26" height="10"/></svg>${label}</span>`;
    node.insertAdjacentHTML('beforeend', '<div class="legend">' + item(0, 'never chosen') +
        [['1/8 and less', 14], ['1/4', 20], ['1/2', 26], ['the mean', 32], ['2 times', 38], ['4', 44], ['8 and more', 50]].map(([label, level]) => item(level, label)).join('') +
        '</div><div><div class="chart heat"><div class="tip" hidden></div></div>' +
        `<label class="time"><input type="range" min="0" max="${steps.length - 1}" value="${steps.length - 1}" aria-label="step"` +
        `${steps.length < 2 ? ' hidden' : ''}><output></output></label></div>`);
    const host = node.querySelector('.chart'), box = node.querySelector('.tip'), slider = node.querySelector('input');
    let left = inset.left, cell = [1, 1], shown = '';
    const draw = () => {
        const i = +slider.value, width = Math.max(260, host.clientWidth || 700), right = width - inset.right;
        const w = (right - left) / experts, h = Math.min(22, Math.max(6, 400 / layers.length)), base = inset.top + h * layers.length;
        shown = load[i];
        cell = [w, h];
        const gap = Math.min(w, h) > 5 ? 1 : 0, paths = new Map();
        [...shown].forEach((letter, at) => {
            const level = letters.indexOf(letter), x = left + at % experts * w, y = inset.top + Math.floor(at / experts) * h;
            paths.set(level, (paths.get(level) ?? '') + `M${x.toFixed(2)} ${y.toFixed(2)}h${(w - gap).toFixed(2)}v${(h - gap).toFixed(2)}h${(gap - w).toFixed(2)}z`);
        });
        const every = Math.ceil(13 / h), parts = [...paths].map(([level, d]) => `<path data-level="${level}" style="fill:${heat(level)}" d="${d}"/>`);
        layers.forEach((layer, l) => { if (l % every === 0) parts.push(`<text x="${left - 8}" y="${inset.top + (l + 0.5) * h + 4}" text-anchor="end">${layer}</text>`); });
        for (const e of ticks(0, experts - 1, Math.max(2, width / 110)).filter(Number.isInteger))
            parts.push(`<text x="${left + (e + 0.5) * w}" y="${base + 15}" text-anchor="middle">${e}</text>`);
        host.querySelector('svg')?.remove();
        host.insertAdjacentHTML('afterbegin', `<svg viewBox="0 0 ${width} ${base + 34}" role="img" aria-label="Load of experts" data-heat="${runs.indexOf(run)}" ` +
            `data-step="${steps[i]}">${parts.join('')}<text x="0" y="11">layer</text><text x="${right}" y="${base + 30}" text-anchor="end">expert</text></svg>`);
        node.querySelector('output').textContent = 'step ' + grouped(steps[i]);
    };
    slider.addEventListener('input', () => { box.hidden = true; draw(); });
    host.addEventListener('pointermove', event => {
        const frame = host.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
        const e = Math.floor((x - left) / cell[0]), l = Math.floor((y - inset.top) / cell[1]);
        box.hidden = !(e >= 0 && e < experts && l >= 0 && l < layers.length);
        if (box.hidden) return;
        const level = letters.indexOf(shown[l * experts + e]);
        box.innerHTML = `<b>layer ${layers[l]}, expert ${e}</b><br>` + (level ? `about ${loadOf(level).toPrecision(2)} times the mean` : 'never chosen');
        box.style.left = Math.max(0, x + 14 + box.offsetWidth > frame.width ? x - 14 - box.offsetWidth : x + 14) + 'px';
        box.style.top = y + 14 + 'px';
    });
    host.addEventListener('pointerleave', () => { box.hidden = true; });
    return draw;
}

let drawnPoints = 0;
const shownPlots = plots.filter(plot => plot.shares || plot.entries.length);
shownPlots.forEach((plot, number) => {
    const node = section(plot.title, plot.good, plot.full, number === 0);
    node.insertAdjacentHTML('beforeend', `<div class="legend">${legend(plot)}</div><div class="chart"><div class="tip" hidden></div></div>`);
    plot.host = node.querySelector('.chart');
    plot.tip = node.querySelector('.tip');
    plot.number = number;
    for (const entry of plot.entries) drawnPoints += entry.curve.y.length;
    listen(plot);
});
const mixtures = runs.filter(run => run.routers), heatMaps = mixtures.map((run, i) => loads(run, i === 0));
memory();

function drawAll() {
    for (const plot of shownPlots) draw(plot);
    for (const drawLoads of heatMaps) drawLoads();
    document.getElementById('reset').disabled = !view;
}
function zoomTo(range) {
    view = range;
    for (const plot of shownPlots) leave(plot);
    drawAll();
}

document.getElementById('tools').hidden = false;
document.getElementById('reset').addEventListener('click', () => zoomTo(null));
for (const button of document.querySelectorAll('[data-axis]')) {
    const needed = {step: true, tokens: runs.every(run => run.curves.tokens), hours: runs.every(run => run.curves.seconds)};
    button.hidden = !needed[button.dataset.axis];
    if (button.dataset.axis === 'hours') button.textContent = unitOfTime.name;
    button.addEventListener('click', () => {
        axis = button.dataset.axis;
        for (const other of document.querySelectorAll('[data-axis]')) other.setAttribute('aria-pressed', other === button);
        zoomTo(null);
    });
}
if (several) runs.forEach((run, r) => {
    const button = document.createElement('button');
    button.innerHTML = `<i class="swatch c${r}"></i>${escaped(run.name)}`;
    button.setAttribute('aria-pressed', true);
    button.addEventListener('click', () => {
        run.shown = !run.shown;
        button.setAttribute('aria-pressed', run.shown);
        drawAll();
    });
    document.getElementById('runs').append(button);
});
document.getElementById('drawn').textContent =
    `The plots have ${grouped(drawnPoints)} points: the smallest and largest value of every pixel, so that no spike is missing.`;

// A page that `train_gpt report --live` serves loads itself again when the runs have gone on, unless somebody is reading a plot.
if ('live' in document.body.dataset) {
    const kept = JSON.parse(sessionStorage.getItem('kept') ?? 'null'), kind = document.querySelector('.kind'), said = kind.textContent;
    const names = runs.map(run => run.name).join();
    if (kept?.names === names) {
        if (kept.axis !== 'step') document.querySelector(`[data-axis=${kept.axis}]`).click();
        if (kept.axis !== 'hours' || kept.unit === unitOfTime.name) view = kept.view;  // minutes become hours in a long run
        for (const r of kept.hidden) document.querySelectorAll('#runs button')[r]?.click();
    }
    setInterval(async () => {
        if (document.hidden) return;
        try {
            const answer = await fetch('data');
            if (!answer.ok) return void (kind.textContent = said + ': ' + await answer.text());
            const now = await answer.json(), more = now.stamp !== stamp;
            const reading = document.querySelector('.chart:hover') !== null;
            kind.textContent = said + (more && reading ? ': new steps are there; move the pointer away to see them' : '');
            if (!more || reading) return;
            sessionStorage.setItem('kept', JSON.stringify({names, axis, view, unit: unitOfTime.name, hidden: [...runs.keys()].filter(r => !runs[r].shown)}));
            location.reload();
        } catch (error) {
            kind.textContent = said + ': nothing comes any more, since train_gpt report --live has ended';
        }
    }, 4000);
}

let width = 0;
new ResizeObserver(() => {
    if (document.documentElement.clientWidth !== width) { width = document.documentElement.clientWidth; drawAll(); }
}).observe(document.body);
drawAll();
})();
