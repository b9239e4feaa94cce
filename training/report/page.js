// Draws the plots of a report from the JSON in the page. A plot is a list of entries: curves of a
// run with the way they are drawn. All plots share the horizontal axis and what is zoomed into.
//
// This file has the data, the axes, how numbers are written, and the list of plots. page_plot.js
// draws a plot, and page_sections.js makes the sections of the page and its controls. The three are
// joined in this order into one script (Makefile), which page.html puts into one function.

const {runs, stamp} = JSON.parse(document.getElementById('data').textContent);
const several = runs.length > 1;
const phases = ['compute', 'communication', 'data wait', 'optimizer'];

// ---- The data -----------------------------------------------------------------------------------

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
const unitOfTime = Math.max(0, ...runs.map(run => run.curves.seconds
    ? run.curves.seconds.y[run.curves.seconds.y.length - 1] : 0)) < 3 * 3600
    ? {name: 'minutes', seconds: 60} : {name: 'hours', seconds: 3600};
const axes = {
    step: {label: 'step', at: (run, step) => step},
    tokens: {label: 'tokens', at: (run, step) => along(run.curves.tokens, step)},
    hours: {label: unitOfTime.name + ' of training',
        at: (run, step) => along(run.curves.seconds, step) / unitOfTime.seconds},
};
let axis = 'step', view = null;  // view: [first, last] on the axis; null: everything

// ---- Numbers ------------------------------------------------------------------------------------

const grouped = value => Math.round(value).toLocaleString('en-US');
const percent = value => (100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0) + ' %';
function short(value) {
    const size = Math.abs(value);
    for (const [unit, name] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e4, 'k']])
        if (size >= unit)
            return String(+(value / (name === 'k' ? 1e3 : unit)).toPrecision(4)) + name;
    return size > 0 && size < 1e-3
        ? value.toExponential().replace(/\.?0+e/, 'e').replace('e-', 'e−')
        : String(+value.toPrecision(6));
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
    return s >= 3600
        ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)} h`
        : `${Math.floor(s / 60)}:${two(s % 60)} min`;
}
const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);

function ticks(low, high, most) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough * (1 - 1e-9));
    const all = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-12 * step; ++i)
        all.push(+(i * step).toPrecision(12));
    return all;
}
function logTicks(low, high) {
    for (const factors of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
        const all = [];
        for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power)
            for (const f of factors)
                if (f * 10 ** power >= low && f * 10 ** power <= high)
                    all.push(+(f * 10 ** power).toPrecision(3));
        if (all.length >= 3) return all;
    }
    return ticks(low, high, 4);
}

// ---- What is plotted ----------------------------------------------------------------------------

/// Entries of a curve in all runs that have it.
const curve = (name, style, label, options = {}) => runs.flatMap((run, r) => run.curves[name]
    ? [{...options, run, name, style, what: label,
        colour: 'c' + (several ? r : options.colour ?? 0), curve: run.curves[name]}]
    : []);
const fixed = digits => value => value.toFixed(digits);
const known = [...new Set(runs.map(run => run.vocabulary).filter(n => n > 0))];
const ignorance = known.length === 1
    ? ` A model that knows nothing would be at ${Math.log(known[0]).toFixed(2)}.` : '';

const plots = [
    {id: 'loss', title: 'Loss', unit: 'nats per token', full: true, height: 340, format: fixed(4),
        crops: true,
        entries: [...curve('loss', 'thin', 'training, each step'),
            ...curve('loss_mean', 'mean', 'training, running mean'),
            ...curve('val_loss', 'dots', 'validation', {colour: 1})],
        good: 'Good: it falls steeply, then ever more slowly, and validation follows training. ' +
            'If validation turns up while training still falls, the model has begun to learn ' +
            'its text by heart. If all of it jumps up and stays there, training has diverged.' +
            ignorance},
    ...(several
        ? sources.map(source => ({id: 'loss/' + source, title: 'Loss on ' + source,
            unit: 'nats per token', format: fixed(4), crops: true,
            entries: [...curve('loss/' + source, 'thin', 'each step'),
                ...curve('loss_mean/' + source, 'mean', 'running mean')],
            good: 'Good: it falls as the loss as a whole does. Sources differ in level, since ' +
                'some texts are easier to predict.'}))
        : [{id: 'sources', title: 'Loss by source', unit: 'nats per token', full: true, height: 300,
            format: fixed(4), crops: true,
            entries: sources.flatMap((source, s) => [
                ...curve('loss/' + source, 'thin', source, {colour: s % 12, silent: true}),
                ...curve('loss_mean/' + source, 'mean', source, {colour: s % 12})]),
            good: 'Good: every source falls. Levels differ, since some texts are easier to ' +
                'predict; a source that stops falling while others do not may be too small and ' +
                'read too often.'}]),
    {id: 'rate', title: 'Learning rate', format: value => exponential(+value.toPrecision(4)),
        tick: exponential, zero: true, entries: curve('learning_rate', 'line', 'learning rate'),
        good: 'How far each step moves the weights. It is planned, not measured: a short rise, ' +
            'then the fall that the schedule asks for.'},
    {id: 'norm', title: 'Gradient norm', format: value => value.toPrecision(4), log: true,
        entries: [...curve('grad_norm', 'thin', 'each step'),
            ...curve('grad_norm_mean', 'mean', 'running mean')],
        limit: {of: run => run.clip, label: 'clipped above'},
        good: 'Good: after the first steps it stays within a band. Single spikes are harmless, ' +
            'since they are clipped; a level that keeps rising often comes before a loss that ' +
            'jumps up.'},
    {id: 'speed', title: 'Throughput', unit: 'tokens per second', format: grouped, zero: true,
        entries: [...curve('tokens_per_second', 'thin', 'each step'),
            ...curve('tokens_per_second_mean', 'mean', 'running mean')],
        limit: {of: run => run.limit,
            label: several ? 'limit of each run' : `limit: ${grouped(runs[0].limit)}`},
        good: 'Good: flat, and near its limit, which is the rate at which this machine ' +
            'multiplies matrices and nothing else. Dips are waiting: for data, for other ranks, ' +
            'or for other programs.'},
    {id: 'experts', title: 'Busiest expert', unit: 'load, as a multiple of the mean',
        format: fixed(2),
        entries: [...curve('router_load', 'thin', 'each step'),
            ...curve('router_load_mean', 'mean', 'running mean')],
        good: 'How often a step chose the expert that it chose most often, of all layers. Good: ' +
            'it falls towards 1 and stays there. If it rises and stays high, a router sends ' +
            'most tokens to few experts, and the others learn little.'},
    {id: 'idle', title: 'Idle experts', unit: 'experts, of all layers', format: fixed(0),
        zero: true,
        entries: [...curve('router_idle', 'thin', 'each step'),
            ...curve('router_idle_mean', 'mean', 'running mean')],
        good: 'Experts that a step chose for none of its tokens. Good: none after the first ' +
            'steps. What never gets a token never learns.'},
    {id: 'bits', title: 'Validation loss per byte', unit: 'bits per byte of text', format: fixed(4),
        entries: curve('val_bits_per_byte', 'dots', 'validation', {colour: 1}),
        good: 'The same validation loss for each byte of text, so that models with different ' +
            'tokenizers can be compared. Lower is better: it is the size to which the model ' +
            'could compress the text.'},
    {id: 'hellaswag', title: 'HellaSwag', unit: 'accuracy', format: percent, tick: percent,
        entries: [...curve('hellaswag', 'dots', 'accuracy'),
            ...curve('hellaswag_normalised', 'dots', 'normalised by length', {colour: 1})],
        good: 'How often the model picks the right one of four endings of a sentence. Guessing ' +
            'gives 25 %; it rises late and slowly.'},
    ...scored.map(name => ({id: name,
        title: name.startsWith('core/') ? `CORE, baselines ${name.slice(5)}`
            : 'Task ' + name.slice(5),
        unit: name.startsWith('core/') ? 'mean centered accuracy' : 'accuracy', format: percent,
        tick: percent,
        entries: [...curve(name + '/low', 'edge', 'less a standard error', {silent: true}),
            ...curve(name + '/high', 'edge', 'plus a standard error', {silent: true}),
            ...curve(name, 'dots', name.startsWith('core/') ? 'CORE' : 'accuracy')],
        bands: runs.flatMap(run => run.curves[name + '/low']
            ? [{run, low: name + '/low', high: name + '/high'}] : []),
        good: name === scored[0] ? 'The band is one standard error of the items to each side: ' +
            'changes within it are noise. Small models guess at many tasks for a long time.'
            : ''})),
    ...runs.map((run, r) => ({id: 'time/' + r,
        title: several ? 'Where the time goes: ' + run.name : 'Where the time goes',
        shares: run.shares && run, format: percent, tick: percent, entries: [],
        good: r > 0 ? '' : 'Good: nearly all of it computes. Communication counts only where ' +
            'computing waits for it, and data wait is time in which the next batch was not ' +
            'ready: it should be none.'})),
];
