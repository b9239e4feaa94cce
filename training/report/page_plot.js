// Draws one plot: its axes, curves, marks and limits, and the values under the pointer. It follows
// page.js, of which it uses the data and the axes.

// ---- One plot -----------------------------------------------------------------------------------

const inset = {left: 54, right: 10, top: 22, bottom: 34};

/// The x of an entry's points on the current axis; kept, since a plot is redrawn often.
function xs(entry) {
    const at = axes[axis].at;
    if (entry.axis !== axis) {
        entry.x = entry.curve.x.map(step => at(entry.run, step));
        entry.axis = axis;
    }
    return entry.x;
}
const visible = plot => plot.entries.filter(entry => entry.run.shown);

function horizontal() {
    if (view) return view;
    let last = 0;
    for (const run of runs) if (run.shown)
        for (const {x} of Object.values(run.curves))
            last = Math.max(last, axes[axis].at(run, x[x.length - 1]));
    return [0, last || 1];
}

/// The lowest and the highest value that a plot shows, and the highest one that there is.
function vertical(plot, [first, last]) {
    if (plot.shares) return [0, 1, 1];
    let low = Infinity, high = -Infinity;
    const include = value => {
        if (value > 0 || !plot.log) { low = Math.min(low, value); high = Math.max(high, value); }
    };
    for (const entry of visible(plot)) {
        const x = xs(entry);
        entry.curve.y.forEach((y, i) => { if (x[i] >= first && x[i] <= last) include(y); });
    }
    if (plot.limit) for (const entry of visible(plot))
        if (plot.limit.of(entry.run) > 0) include(plot.limit.of(entry.run));
    if (low > high) return plot.log ? [0.1, 1, 1] : [0, 1, 1];
    if (plot.log) return [low / 1.15, high * 1.15, high];
    if (plot.zero) return [0, high * 1.06 || 1, high];
    const most = plot.crops && !view ? cropped(plot, [first, last], [low, high]) : high;
    const margin = (most - low) * 0.05 || Math.abs(most) * 0.05 || 1;
    return [low - margin, most + margin, high];
}

/// The highest value to show of a whole run. A run's first losses are so much higher than all
/// others that these would be squeezed together, and so may single losses be anywhere, of 10^7 say.
/// The top of the first 3 % is left out, and what is far above 98 of 100 values.
function cropped(plot, [first, last], [low, high]) {
    const from = first + 0.03 * (last - first);
    let usual = -Infinity, most = -Infinity;
    for (const entry of visible(plot)) {
        if (entry.style === 'mean') continue;  // near a high loss the mean is high too
        const x = xs(entry),
            values = entry.curve.y.filter((y, i) => x[i] >= from).sort((a, b) => a - b);
        if (!values.length) continue;
        // The share of high losses is that of the run's steps, since a drawn curve keeps all high
        // ones.
        usual = Math.max(usual, entry.run.usual[entry.name] ??
            values[Math.floor(0.98 * (values.length - 1))]);
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
        parts.push(
            `<line class="grid" x1="${inset.left}" x2="${right}" y1="${py(y)}" y2="${py(y)}"/>` +
            `<text x="${inset.left - 8}" y="${py(y) + 4}" text-anchor="end">` +
            `${(plot.tick ?? short)(y)}</text>`);
    for (const x of ticks(x0, x1, Math.max(2, width / 110))) {
        const label = short(x), over = px(x) + label.length * 3.6 > width;  // the page's edge
        parts.push(`<text x="${over ? width : px(x)}" y="${base + 17}" ` +
            `text-anchor="${over ? 'end' : 'middle'}">${label}</text>`);
    }
    parts.push(
        `<line class="base" x1="${inset.left}" x2="${right}" y1="${base}" y2="${base}"/>`,
        `<text x="${right}" y="${base + 32}" text-anchor="end">${axes[axis].label}</text>`);
    const unit = [plot.unit, plot.log ? 'logarithmic axis' : '',
        y1 < top ? `some are higher, up to ${short(+top.toPrecision(2))}` : '']
        .filter(Boolean).join('; ');
    if (unit) parts.push(`<text class="unit" x="0" y="11">${unit}</text>`);
    parts.push(`<g clip-path="url(#clip-${plot.number})">`,
        plot.shares ? areas(plot, px, py) : lines(plot, px, py), '</g>');
    parts.push(marks(plot, px, base));
    plot.host.querySelector('svg')?.remove();
    plot.host.insertAdjacentHTML('afterbegin',
        `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${escaped(plot.title)}" ` +
        `data-plot="${escaped(plot.id)}" data-domain="${[x0, x1, y0, y1].join(' ')}" ` +
        `data-top="${top}" data-area="${[inset.left, right, base, inset.top].join(' ')}" ` +
        `data-log="${plot.log ? 1 : 0}">` +
        `<clipPath id="clip-${plot.number}"><rect x="${inset.left - 5}" y="${inset.top - 6}" ` +
        `width="${right - inset.left + 10}" height="${base - inset.top + 7}"/></clipPath>` +
        parts.join('') +
        `<line class="cross" y1="${inset.top - 6}" y2="${base}" visibility="hidden"/>` +
        `<rect class="zoom" y="${inset.top - 6}" height="${base - inset.top + 6}" ` +
        `visibility="hidden"/></svg>`);
}

function lines(plot, px, py) {
    let text = '';
    const round = value => value.toFixed(2);
    for (const {run, low, high} of plot.bands ?? []) {
        if (!run.shown) continue;
        const [below, above] = [low, high].map(name =>
            visible(plot).find(entry => entry.run === run && entry.name === name));
        const edge = entry => entry.curve.y.map((value, i) =>
            round(px(xs(entry)[i])) + ' ' + round(py(value)));
        text += `<path class="band ${above.colour}" ` +
            `data-band="${escaped(low.replace(/\/low$/, ''))}" ` +
            `d="M${[...edge(above), ...edge(below).reverse()].join('L')}Z"/>`;
    }
    for (const entry of visible(plot)) {
        if (entry.style === 'edge') continue;
        const x = xs(entry), y = entry.curve.y;
        const points = y.map((value, i) => round(px(x[i])) + ' ' +
            round(py(Math.max(value, plot.log ? plot.y0 : -Infinity))));
        const names = `data-run="${runs.indexOf(entry.run)}" data-curve="${escaped(entry.name)}"`;
        text += `<path class="line ${entry.style} ${entry.colour}" ${names} ` +
            `d="M${points.join('L')}"/>`;
        if (entry.style === 'dots' || points.length === 1)
            text += points.map(p => `<circle class="dot ${entry.colour}" ` +
                `cx="${p.split(' ')[0]}" cy="${p.split(' ')[1]}" ` +
                `r="${points.length > 60 ? 2 : 3.5}"/>`).join('');
    }
    if (plot.limit) for (const run of new Set(visible(plot).map(entry => entry.run))) {
        const limit = plot.limit.of(run);
        if (limit > 0)
            text += `<path class="line dashed c${several ? runs.indexOf(run) : 0}" ` +
                `data-limit="${limit}" d="M${inset.left} ${py(limit)}H${plot.right}"/>`;
    }
    return text;
}

function areas(plot, px, py) {
    const run = plot.shares, {x} = run.shares, at = axes[axis].at;
    const edges = x.map(step => px(at(run, step)).toFixed(2));
    let text = '', below = edges.slice(1).map(() => 0);
    phases.forEach((phase, p) => {
        const above = run.shares[phase].map((share, i) => below[i] + share);
        const top = above.map((y, i) =>
            `L${edges[i]} ${py(Math.min(y, 1)).toFixed(2)}H${edges[i + 1]}`).join('');
        const bottom = below.map((y, i) =>
            `L${edges[i + 1]} ${py(y).toFixed(2)}H${edges[i]}`).reverse().join('');
        text += `<path class="area p${p}" d="M${(top + bottom).slice(1)}Z"/>`;
        below = above;
    });
    return text;
}

/// Where runs stopped or resumed.
const marksOf = plot => runs.flatMap((run, r) => run.shown && (!plot.shares || plot.shares === run)
    ? run.marks.map(([step, text]) => ({x: axes[axis].at(run, step), r,
        text: (several ? run.name + ': ' : '') + text}))
    : []);
function marks(plot, px, base) {
    const all = marksOf(plot).filter(({x}) => x >= plot.x0 && x <= plot.x1);
    const named = plot.full && !several && all.length < 3;
    return all.map(({x, r, text}, i) => {
        // The text is on the side that has more room, up to the next mark, and is cut where it does
        // not fit.
        const left = px(x) - (i > 0 ? px(all[i - 1].x) : inset.left),
            right = (i + 1 < all.length ? px(all[i + 1].x) : plot.right) - px(x);
        const most = Math.floor((Math.max(left, right) - 8) / 6.6),
            shownText = text.length > most ? text.slice(0, Math.max(0, most - 1)) + '…' : text;
        return `<g><title>${escaped(text)}</title>` +
            `<line class="mark" x1="${px(x)}" x2="${px(x)}" y1="${inset.top}" y2="${base}"/>` +
            `<path class="${several ? 'dot c' + r : 'flag'}" d="M${px(x)} ${base - 7}l4 7h-8z"/>` +
            (named && most > 3
                ? `<text class="mark-text" x="${px(x) + (right >= left ? 5 : -5)}" ` +
                    `y="${inset.top + 6}" text-anchor="${right >= left ? 'start' : 'end'}">` +
                    `${escaped(shownText)}</text>`
                : '') + '</g>';
    }).join('');
}

// ---- Values under the pointer -------------------------------------------------------------------

function tip(plot, x) {
    const place = (run, step) => [`step ${grouped(step)}`,
        run.curves.tokens ? short(along(run.curves.tokens, step)) + ' tokens' : '',
        run.curves.seconds ? duration(along(run.curves.seconds, step)) : '']
        .filter(Boolean).join(' · ');
    const rows = [];
    let head = '';
    const row = (colour, label, value) => rows.push(
        `<tr><td><i class="swatch ${colour}"></i>${escaped(label)}</td><td>${value}</td></tr>`);
    if (plot.shares) {
        const run = plot.shares, ends = run.shares.x.map(step => axes[axis].at(run, step));
        const found = ends.findIndex(end => end >= x),
            i = found < 0 ? ends.length - 1 : Math.max(1, found);
        head = place(run, run.shares.x[i]);
        phases.forEach((phase, p) => row('p' + p, phase, percent(run.shares[phase][i - 1])));
        const groups = Object.entries(run.shares.groups);
        if (groups.length > 1)
            groups.forEach(([group, shares]) =>
                row('p1', `waiting along ${group}`, percent(shares[i - 1])));
    }
    for (const entry of visible(plot)) {
        const all = xs(entry), i = nearest(all, x);
        head = head || place(entry.run, entry.curve.x[i]);
        if (entry.silent || several && entry.style !== 'mean' &&
            visible(plot).some(other => other.run === entry.run && other.style === 'mean'))
            continue;
        const value = entry.curve.y[i];
        let text = plot.format(value);
        if (entry.style === 'dots')
            text += ` <span class="swatch"></span>at step ${grouped(entry.curve.x[i])}`;
        if (entry.name.startsWith('tokens_per_second') && entry.run.limit > 0)
            text += `, ${percent(value / entry.run.limit)} of the limit`;
        row(entry.colour, several ? `${entry.run.name}, ${entry.what}` : entry.what, text);
    }
    for (const mark of marksOf(plot))
        if (Math.abs(plot.px(mark.x) - plot.px(x)) < 6)
            rows.push(`<tr><td colspan="2">${escaped(mark.text)}</td></tr>`);
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
    const left = pixel + 14 + box.offsetWidth > plot.width
        ? pixel - 14 - box.offsetWidth : pixel + 14;
    box.style.left = Math.max(0, left) + 'px';
    box.style.top = inset.top + 6 + 'px';
}
function leave(plot) {
    plot.tip.hidden = true;
    for (const cross of document.querySelectorAll('.cross'))
        cross.setAttribute('visibility', 'hidden');
}

function listen(plot) {
    let from = null;
    const pixel = event => {
        const box = plot.host.getBoundingClientRect();
        return Math.min(plot.right, Math.max(inset.left,
            (event.clientX - box.left) * plot.width / box.width));
    };
    const band = to => {
        const zoom = plot.host.querySelector('.zoom');
        zoom.setAttribute('visibility', to === null ? 'hidden' : 'visible');
        if (to === null) return;
        zoom.setAttribute('x', Math.min(from, to));
        zoom.setAttribute('width', Math.abs(to - from));
    };
    plot.host.addEventListener('pointerdown', event => {
        if (event.button === 0) from = pixel(event);
    });
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
        const value = at => plot.x0 +
            (at - inset.left) / (plot.right - inset.left) * (plot.x1 - plot.x0);
        zoomTo([value(Math.min(start, to)), value(Math.max(start, to))]);
    });
    plot.host.addEventListener('dblclick', () => zoomTo(null));
}
