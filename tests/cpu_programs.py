"""Small programs with one known weakness, and others that only look so. Each function returns a program's step.

    python tests/cpu_programs.py [FOLDER …]

records three steps of each on a CPU with nothing else to do, into the folders of tests/traces/cpu.
"""

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from tracereader.run.shapes import put_into


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mlp(*sizes):
    return nn.Sequential(*[nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(sizes)])


def head_alone(weak):
    """Only a head is trained, and the model before it is not told so."""
    body, head, x = mlp(64, 256, 256, 64).requires_grad_(weak), nn.Linear(64, 4), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(head.parameters())

    def step():
        head(body(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def teacher(weak):
    """A student learns from a teacher of the same sizes."""
    student, old, x = mlp(64, 256, 64), mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.SGD(student.parameters(), 0.01, momentum=0.9)

    def step():
        with torch.set_grad_enabled(weak):
            target = old(x)
        loss = (student(x) - target).pow(2).mean()
        update(optimizer, loss)

    return step


def condition(weak):
    """An encoder that is not trained gives a model its condition."""
    encoder, model = mlp(64, 256, 256, 64).requires_grad_(weak), nn.Bilinear(64, 64, 8)
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(32, 64)

    def step():
        c = encoder(x)
        model(torch.randn(32, 64), c).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_network():
    """The gradient of what is trained comes through the network that is not."""
    model, judge, x = mlp(64, 64), mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        judge(model(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulation():
    model, x = mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        for _ in range(3):
            model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shared_layer():
    """A layer's later calls, each of which has a backward of its own, add to the gradient of its first one."""
    first, layer, x = nn.Linear(64, 64), mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.Adam([*first.parameters(), *layer.parameters()])

    def step():
        h = first(x)
        for _ in range(4):
            h = checkpoint(layer, h, use_reentrant=True)
        h.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def every_second_step():
    """Some parameters are updated with the gradients of two steps."""
    slow, fast, x, count = mlp(64, 256, 64), nn.Linear(64, 4), torch.randn(32, 64), 0
    optimizers = torch.optim.SGD(fast.parameters(), 0.01), torch.optim.SGD(slow.parameters(), 0.01)

    def step():
        nonlocal count
        count += 1
        fast(slow(x)).pow(2).mean().backward()
        for one in optimizers[: 1 + (count % 2 == 0)]:
            one.step()
            one.zero_grad()

    return step


def biases_alone():
    """An optimizer that was given the weights alone leaves the gradients of the biases, which need no product."""
    model, x = mlp(64, 256, 256, 4), torch.randn(32, 64)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.dim() > 1], 0.01)

    def step():
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zeroed_by_hand():
    """One of two parts sets its gradients to zero by itself, and adds to them."""
    body, head, x = mlp(64, 256, 64), nn.Linear(64, 4), torch.randn(32, 64)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.01)

    def step():
        for one in body.parameters():
            if one.grad is not None:
                one.grad.zero_()
        head.zero_grad()
        head(body(x)).pow(2).mean().backward()
        optimizer.step()

    return step


def inputs_with_gradients():
    """Gradients of many steps add up, and only those of the inputs are new in each step."""
    words, model, tokens, count = nn.Embedding(50, 64).requires_grad_(False), mlp(64, 256, 4), torch.arange(32), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step():
        nonlocal count
        count += 1
        model(words(tokens).requires_grad_()).pow(2).mean().backward()
        if count % 16 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def refinement():
    """A model improves what it is given, several times."""
    model, back, x = mlp(64, 256, 16), torch.randn(16, 64), torch.randn(32, 64)

    @torch.no_grad()
    def step():
        z = x
        for _ in range(6):
            z = z + 0.1 * (model(z).tanh() @ back)
        return model(z).detach()

    return step


def two_views():
    """A model sees two views of the same thing."""
    model, x, y = mlp(64, 256, 16), torch.randn(32, 64), torch.randn(32, 64)

    @torch.no_grad()
    def step():
        return (model(x) - model(y)).abs().mean()

    return step


def shared_words():
    """An encoder and a decoder look up words in one table, and the decoder needs the encoder's result."""
    table, encoder, decoder = nn.Embedding(50, 64), mlp(64, 256, 256, 64), mlp(64, 256, 64)
    source, target = torch.arange(32), torch.arange(32).flip(0)

    @torch.no_grad()
    def step():
        return decoder(table(target) + encoder(table(source))).mean()

    return step


def sample_loop(weak):
    """The loss of each sample is computed by itself, in a random order."""
    model, x, y = mlp(64, 128, 128, 8), torch.randn(256, 64), torch.randint(0, 8, (256,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)

    def step():
        rows = torch.randperm(256)[:24]
        optimizer.zero_grad()
        if weak:
            each = [nn.functional.cross_entropy(model(x[row][None]), y[row][None]) for row in rows.tolist()]
            loss = sum(each) / len(each)
        else:
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()

    return step


def tables(weak):
    """Each of many columns of categories has its own embedding."""
    sizes, width = [50 + 37 * place % 400 for place in range(24)], 16
    rows = torch.stack([torch.randint(0, size, (256,)) for size in sizes], 1)
    apart = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
    together, starts = nn.Embedding(sum(sizes), width), torch.tensor([0, *sizes[:-1]]).cumsum(0)
    head = nn.Linear(width * len(sizes), 1)
    used = apart if weak else together
    optimizer = torch.optim.SGD([*used.parameters(), *head.parameters()], 0.01, foreach=True)

    def step():
        if weak:
            words = torch.cat([table(rows[:, place]) for place, table in enumerate(apart)], 1)
        else:
            words = together(rows + starts).flatten(1)
        update(optimizer, head(words).square().mean())

    return step


def image_encoder():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())


def over_times(passes, more=()):
    """Return a step that trains an encoder with a loop over the times of a video."""
    encoder, video = image_encoder(), torch.randn(4, 12, 3, 8, 8)
    optimizer = torch.optim.SGD([*encoder.parameters(), *more], 0.01, foreach=True)

    def step():
        update(optimizer, passes(encoder, video).square().mean())

    return step


def times():
    """Each time is encoded by itself."""
    return over_times(lambda encoder, video: torch.stack([encoder(video[:, time]) for time in range(12)]))


def times_with_layers():
    """Each time goes through linear layers, whose gradients are added in two ways."""
    model, x = mlp(32, 64, 32), torch.randn(16, 12, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)

    def step():
        update(optimizer, torch.stack([model(x[:, time]) for time in range(12)]).square().mean())

    return step


def last_result_detached():
    """Each time is changed by what was found in the one before, through which no gradient goes."""

    def passes(encoder, video):
        found, before = [], torch.zeros(4, 3, 8, 8)
        for time in range(12):
            found.append(encoder(video[:, time] + before))
            before = found[-1].detach()[:, :3]
        return torch.stack(found)

    return over_times(passes)


def last_result_picked():
    """Each time is changed by a row of a table, which what was found in the one before picks."""
    table = torch.randn(8, 3, 1, 1)

    def passes(encoder, video):
        found, row = [], torch.zeros(4, dtype=torch.long)
        for time in range(12):
            found.append(encoder(video[:, time] + table[row]))
            row = found[-1].mean((2, 3)).argmax(1)
        return torch.stack(found)

    return over_times(passes)


def last_result_without_gradients():
    """Each time is changed by what an encoder of the one before found, which is computed without autograd."""
    mixes = torch.randn(3, 8)

    def passes(encoder, video):
        found, shift = [], torch.zeros(4, 3, 1, 1)
        for time in range(12):
            found.append(encoder(video[:, time] + shift))
            with torch.no_grad():
                shift = (encoder(video[:, time] + shift).mean((2, 3)) @ mixes.T)[..., None, None]
        return torch.stack(found)

    return over_times(passes)


def state_of_an_encoder():
    """The state begins with the features of all images, and only the last state is used."""
    begin = image_encoder()
    more = [nn.Parameter(torch.randn(8, 8) * 0.1), *begin.parameters()]

    def passes(encoder, video):
        state = begin(video.mean(1))
        for time in range(12):
            state = encoder(video[:, time]) + (more[0] @ state.flatten(2)).view_as(state).relu()
        return state

    return over_times(passes, more)


def own_layers():
    """Each layer of a network takes a part of the condition, and what the layer before found."""
    layers, begin = nn.ModuleList(nn.Linear(32, 32) for _ in range(6)), nn.Parameter(torch.randn(8, 32))
    condition = torch.randn(8, 6, 32)
    optimizer = torch.optim.SGD([*layers.parameters(), begin], 0.01, foreach=True)

    def step():
        h = begin
        for place, layer in enumerate(layers):
            h = layer(h + condition[:, place]).relu()
        update(optimizer, h.square().mean())

    return step


def leaky():
    """A state decays before the part of a time is added to it, so that the last pass looks different."""
    into, x = nn.Linear(16, 32), torch.randn(8, 12, 16)
    optimizer = torch.optim.SGD(into.parameters(), 0.01, foreach=True)

    def step():
        z, state, states = into(x), torch.zeros(8, 32), []
        for time in range(12):
            state = 0.9 * state + 0.1 * z[:, time]
            states.append(state)
        update(optimizer, torch.stack(states).square().mean())

    return step


def over_steps(passes, *modules):
    """Return a step that trains modules with a loop over the times of 12 vectors of 10 values."""
    x, optimizer = torch.randn(6, 12, 10), torch.optim.SGD(nn.ModuleList(modules).parameters(), 0.01, foreach=True)

    def step():
        update(optimizer, sum(one.square().mean() for one in passes(x)))

    return step


def layers_around_a_cell():
    """Each time has layers of its own before a recurrent cell, and a head after it. The state begins with zeros."""
    encoder, cell, head = (
        nn.Sequential(nn.Linear(10, 18), nn.ReLU(), nn.Linear(18, 20)),
        nn.GRUCell(20, 16),
        mlp(16, 7, 3),
    )

    def passes(x):
        h, found = torch.zeros(6, 16), []
        for one in x.unbind(1):
            h = cell(encoder(one), h)
            found.append(head(h))
        return found

    return over_steps(passes, encoder, cell, head)


def layers_under_autocast():
    """The same, with a state that an encoder begins. Autocast casts each weight in the first pass."""
    encoder, cell, head, begin = mlp(10, 18, 20), nn.GRUCell(20, 16), nn.Linear(16, 3), nn.Linear(10, 16)

    def passes(x):
        with torch.autocast("cpu", torch.bfloat16):
            h, found = begin(x.mean(1)), []
            for time in range(12):
                h = cell(encoder(x[:, time]), h)
                found.append(head(h).float())
        return found

    return over_steps(passes, encoder, cell, head, begin)


def losses_in_each_pass():
    """Each pass adds a loss of its head, which no other pass takes."""
    into, cell, head, wanted = nn.Linear(10, 20), nn.GRUCell(20, 16), nn.Linear(16, 3), torch.randn(6, 12, 3)

    def passes(x):
        h, loss = torch.zeros(6, 16), 0.0
        for time in range(12):
            h = cell(into(x[:, time]).relu(), h)
            loss = loss + nn.functional.mse_loss(head(h), wanted[:, time])
        return [loss]

    return over_steps(passes, into, cell, head)


def scores_subtracted():
    """Each pass subtracts what its head finds from a score, in place, after a product of its input with itself."""
    into, cell, head = nn.Linear(10, 20), nn.GRUCell(20, 16), nn.Linear(16, 3)

    def passes(x):
        h, score = torch.zeros(6, 16), torch.zeros(6)
        for one in x.unbind(1):
            h = cell(into(one @ one.t() @ one).relu(), h)
            score -= torch.sigmoid(head(h)).sum(1)
        return [score]

    return over_steps(passes, into, cell, head)


def layers_with_a_context():
    """Each layer of a decoder computes keys of the same context, with weights of its own."""
    own = [nn.ModuleList(nn.Linear(10, 10) for _ in range(12)) for _ in range(2)]

    def passes(x):
        context, h = x.mean(1), x[:, 0]
        for key, layer in zip(*own, strict=True):
            h = layer(h * torch.tanh(key(context)))
        return [h]

    return over_steps(passes, *own)


def result_fed_back():
    """The head's result is joined to the input of the next pass."""
    cell, head = nn.GRUCell(13, 16), nn.Linear(16, 3)

    def passes(x):
        h, result, found = torch.zeros(6, 16), torch.zeros(6, 3), []
        for time in range(12):
            h = cell(torch.cat([x[:, time], result], 1), h)
            result = head(h)
            found.append(result)
        return found

    return over_steps(passes, cell, head)


def image_fed_back():
    """The image that a pass finds is taken by the next one."""
    into, mixed, out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    video = torch.randn(2, 12, 3, 6, 6)

    def passes(_):
        image, found = torch.zeros(2, 3, 6, 6), []
        for time in range(12):
            state = torch.tanh(mixed(into(video[:, time]).relu() + into(image)))
            image = out(state)
            found.append(image)
        return found

    return over_steps(passes, into, mixed, out)


def state_without_its_history():
    """The state is taken as .data, which leaves no op in the trace, and so needs no gradient."""
    into, hidden, head = nn.Linear(10, 20), nn.Linear(20, 20), nn.Linear(20, 3)

    def passes(x):
        h, found = torch.zeros(6, 20), []
        for time in range(12):
            h = torch.tanh(into(x[:, time]) + hidden(h.data))
            found.append(head(h))
        return found

    return over_steps(passes, into, hidden, head)


def average_of_features():
    """A running average of what a layer finds is computed without autograd, from results of its size."""
    into, cell = nn.Linear(10, 20), nn.GRUCell(20, 16)

    def passes(x):
        h, average, found = torch.zeros(6, 16), torch.zeros(6, 20), []
        for time in range(12):
            features = into(x[:, time])
            with torch.no_grad():
                average = average * 0.9 + features * 0.1
            h = cell(features - average, h)
            found.append(h)
        return found

    return over_steps(passes, into, cell)


def state_first(kept=lambda h: h):
    """The layer that takes the state comes before the one that takes the part, and has as many inputs."""
    hidden, into, begin = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 6)

    def passes(x):
        h, found = kept(begin.weight), []
        for one in x.unbind(1):
            found.append(torch.tanh(hidden(h).relu() * into(one)))
            h = kept(found[-1])
        return found

    return over_steps(passes, hidden, into, begin)


def detached_state_first():
    """The same, without the gradient of the state."""
    return state_first(torch.Tensor.detach)


def frozen_state_first():
    """A layer that is trained takes the state of a cell that is not."""
    cell, head = nn.GRUCell(10, 10).requires_grad_(False), nn.Linear(10, 3)

    def passes(x):
        h, found = torch.zeros(6, 10), []
        for one in x.unbind(1):
            found.append(head(h).relu())
            h = cell(one, h)
        return found

    return over_steps(passes, head)


def centered_inputs():
    """A running average of the data, which needs no gradient, is taken from each part."""
    into, cell = nn.Linear(10, 20), nn.GRUCell(20, 16)

    def passes(x):
        h, average, found = torch.zeros(6, 16), torch.zeros(6, 10), []
        for time in range(12):
            average = average * 0.9 + x[:, time] * 0.1
            h = cell(into(average), h)
            found.append(h)
        return found

    return over_steps(passes, into, cell)


def part_fed_back():
    """A part of the head's result is joined to the input of the next pass."""
    cell, head = nn.GRUCell(11, 16), nn.Linear(16, 3)

    def passes(x):
        h, first, found = torch.zeros(6, 16), torch.zeros(6), []
        for time in range(12):
            h = cell(torch.cat([x[:, time], first.unsqueeze(1)], 1), h)
            result = head(h)
            first = result[:, 0]
            found += [result, first]
        return found

    return over_steps(passes, cell, head)


def fast_weights():
    """Each pass changes the weight that the next one uses."""
    weight, cell = nn.Linear(10, 12, bias=False), nn.GRUCell(12, 16)

    def passes(x):
        h, own, found = torch.zeros(6, 16), weight.weight, []
        for time in range(12):
            features = nn.functional.linear(x[:, time], own)
            own = own + 0.01 * features.t() @ x[:, time]
            h = cell(features, h)
            found.append(h)
        return found

    return over_steps(passes, weight, cell)


def update_in_each_pass():
    """The model learns from each time before it sees the next one."""
    into, head = nn.Linear(10, 20), nn.Linear(20, 3)
    x, optimizer = torch.randn(6, 12, 10), torch.optim.SGD([*into.parameters(), *head.parameters()], 0.01)

    def step():
        for time in range(12):
            update(optimizer, head(into(x[:, time]).relu()).square().mean())

    return step


def parts(tensor, dim, weak):
    return [tensor.select(dim, place) for place in range(tensor.shape[dim])] if weak else tensor.unbind(dim)


def recurrence(weak):
    """A recurrent layer is written by hand."""
    into, hidden, x = nn.Linear(32, 128), nn.Linear(32, 128), torch.randn(16, 24, 32)
    optimizer = torch.optim.SGD([*into.parameters(), *hidden.parameters()], 0.01, foreach=True)

    def step():
        h = c = x.new_zeros(16, 32)
        for one in parts(into(x), 1, weak):
            i, f, o, u = (one + hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * u.tanh()
            h = o.sigmoid() * c.tanh()
        update(optimizer, h.square().mean())

    return step


def scan(weak):
    """A state decays from one time step to the next."""
    decay, added, x = nn.Linear(32, 32), nn.Linear(32, 128), torch.randn(4, 40, 32)
    optimizer = torch.optim.SGD([*decay.parameters(), *added.parameters()], 0.01, foreach=True)

    def step():
        keeps = decay(x).sigmoid()[..., None]
        adds = added(x).view(4, 40, 32, 4)
        state, states = torch.zeros(4, 32, 4), []
        for keep, add in zip(parts(keeps, 1, weak), parts(adds, 1, weak), strict=True):
            state = keep * state + add
            states.append(state)
        update(optimizer, torch.stack(states, 1).square().mean())

    return step


def heads(weak):
    """The heads of an attention layer are computed one after the other."""
    into, out, x = nn.Linear(64, 192), nn.Linear(64, 64), torch.randn(4, 32, 64)
    optimizer = torch.optim.SGD([*into.parameters(), *out.parameters()], 0.01, foreach=True)

    def step():
        q, k, v = (parts(one, 2, weak) for one in into(x).view(4, 32, 3, 8, 8).unbind(2))
        found = [(a @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
        update(optimizer, out(torch.cat(found, -1)).square().mean())

    return step


def first_tokens():
    """Each layer's output is indexed once, so that there is nothing to unbind."""
    layers, x = nn.ModuleList(mlp(32, 32) for _ in range(8)), torch.randn(8, 16, 32)
    optimizer = torch.optim.SGD(layers.parameters(), 0.01, foreach=True)

    def step():
        h, found = x, 0
        for layer in layers:
            h = layer(h)
            found = found + h[:, 0]
        update(optimizer, found.square().mean())

    return step


def products(weak):
    """Data from NumPy is in float64, and the model follows it."""
    dtype = torch.float64 if weak else torch.float32
    model, x = mlp(64, 256, 256, 1).to(dtype), torch.randn(128, 64, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)

    def step():
        update(optimizer, model(x).square().mean())

    return step


def stencil(weak):
    """Heat spreads on a grid."""
    heat = torch.rand(256, 256, dtype=torch.float64 if weak else torch.float32)

    def step():
        nonlocal heat
        for _ in range(3):
            near = sum(heat.roll(by, dim) for by in (1, -1) for dim in (0, 1))
            heat = heat + 0.1 * (near - 4 * heat) * torch.exp(-heat)

    return step


def kernel(weak):
    """The likelihood of a Gaussian process is maximized."""
    dtype = torch.float64 if weak else torch.float32
    x, scale = torch.rand(150, 3, dtype=dtype), torch.zeros(3, dtype=dtype, requires_grad=True)
    y, noise = x.sum(1, keepdim=True).sin(), 0.1 * torch.eye(150, dtype=dtype)
    optimizer = torch.optim.SGD([scale], 0.001)

    def step():
        optimizer.zero_grad()
        z = x / scale.exp()
        lower = torch.linalg.cholesky(torch.exp(-0.5 * torch.cdist(z, z) ** 2) + noise)
        (0.5 * (y * torch.cholesky_solve(y, lower)).sum() + lower.diagonal().log().sum()).backward()
        optimizer.step()

    return step


def trained(modules, loss):
    """Return a step that trains these modules."""
    optimizer = torch.optim.SGD(modules.parameters(), 0.01, foreach=True)
    return lambda: update(optimizer, loss().square().mean())


def experts():
    """Each expert sees the same features, whose gradients add up."""
    first, some = nn.Linear(24, 48), nn.ModuleList(mlp(48, 64, 16) for _ in range(6))
    x, modules = torch.randn(32, 24), nn.ModuleList([first, some])

    def loss():
        features = first(x)
        return torch.stack([one(features) for one in some]).mean(0)

    return trained(modules, loss)


def experts_before_their_gate():
    """Each expert sees the same features, and so does what weights them, after that."""
    first, gate, some = nn.Linear(24, 48), nn.Linear(48, 6), nn.ModuleList(mlp(48, 64, 16) for _ in range(6))
    x, modules = torch.randn(32, 24), nn.ModuleList([first, gate, some])

    def loss():
        features = first(x)
        results = torch.stack([one(features) for one in some], -1)
        return results @ gate(features).softmax(-1)[..., None]

    return trained(modules, loss)


def networks_of_variables():
    """Each variable has a residual network, and their mean decides about their weights."""
    firsts, seconds = (nn.ModuleList(nn.Linear(24, 24) for _ in range(5)) for _ in range(2))
    x, modules = torch.randn(5, 32, 24), nn.ModuleList([firsts, seconds])

    def loss():
        variables = [first(one) for first, one in zip(firsts, x, strict=True)]
        weights = torch.cat(variables, -1).mean()
        return weights * torch.stack([one + second(one) for second, one in zip(seconds, variables, strict=True)], -1)

    return trained(modules, loss)


def hidden_states():
    """A layer takes the result of the one before it, and all of these results are averaged."""
    layers, x = nn.ModuleList(nn.Linear(24, 24) for _ in range(6)), torch.randn(32, 24)

    def loss():
        h, states = x, []
        for layer in layers:
            h = h + layer(h).tanh()
            states.append(h)
        return torch.stack(states)

    return trained(layers, loss)


def cascade():
    """Each part of the channels is added to the result of the part before it, as in Res2Net."""
    layers, x = nn.ModuleList(nn.Linear(12, 12) for _ in range(6)), torch.randn(32, 72)
    first = nn.Linear(72, 72)

    def loss():
        result, results = torch.zeros(32, 12), []
        for layer, part in zip(layers, first(x).chunk(6, -1), strict=True):
            result = layer(part + result)
            results.append(result)
        return torch.cat(results, -1)

    return trained(nn.ModuleList([first, layers]), loss)


def own_head_of_each_state():
    """Each time has a cell and a head of its own. The states are not joined, and no head takes another one's result."""
    cells, heads = (nn.ModuleList(nn.Linear(24, wide) for _ in range(6)) for wide in (24, 8))
    known, modules = [torch.randn(32, 24) for _ in range(6)], nn.ModuleList([cells, heads])

    def loss():
        scale = torch.cat(known).mean()
        state, results = known[0], []
        for cell, head in zip(cells, heads, strict=True):
            state = cell(state).tanh()
            results.append(head(state))
        return scale * torch.stack(results)

    return trained(modules, loss)


def actors():
    """Each agent acts by a network of its own."""
    some, x = nn.ModuleList(mlp(24, 64, 5) for _ in range(6)), torch.randn(32, 6, 24)
    return torch.no_grad()(lambda: torch.stack([one(x[:, i]) for i, one in enumerate(some)], 1).argmax(-1))


def one_actor():
    """All agents act by one network, with one pass for each."""
    one, x = mlp(24, 64, 5), [torch.randn(32, 24) for _ in range(6)]
    return torch.no_grad()(lambda: torch.stack([one(part) for part in x], 1).argmax(-1))


def layers_in_turn():
    """The results of all layers are kept, as for a probe of each of them."""
    layers = nn.ModuleList(nn.Sequential(mlp(24, 64), nn.Linear(64, 24)) for _ in range(6))
    x = torch.randn(32, 24)

    @torch.no_grad()
    def step():
        h, states = x, []
        for layer in layers:
            h = layer(h)
            states.append(h)
        return torch.stack(states).mean()

    return step


def skip_over_all():
    """The first features are added to what the layers after them make, as in networks for super resolution."""
    first, layers, fuse = nn.Linear(24, 24), nn.ModuleList(nn.Linear(24, 24) for _ in range(5)), nn.Linear(120, 24)
    x, modules = torch.randn(32, 24), nn.ModuleList([first, layers, fuse])

    def loss():
        h = features = first(x)
        results = []
        for layer in layers:
            h = layer(h).tanh()
            results.append(h)
        return fuse(torch.cat(results, -1)) + features

    return trained(modules, loss)


def state_after_each_forecast():
    """Each layer forecasts from a state, which then changes. What the last one changes is of no use."""
    first, layers, x = nn.Linear(24, 24), nn.ModuleList(nn.Linear(24, 24) for _ in range(6)), torch.randn(32, 24)

    def loss():
        state, results = first(x), []
        for layer in layers:
            results.append(layer(state))
            state = state - x
        return torch.stack(results)

    return trained(nn.ModuleList([first, layers]), loss)


def running_mean():
    """Each layer sees the mean of the results before it, which is kept in place."""
    layers, x, mean = nn.ModuleList(nn.Linear(24, 24) for _ in range(6)), torch.randn(32, 24), torch.zeros(32, 24)

    def loss():
        results = []
        for layer in layers:
            with torch.no_grad():
                mean.mul_(0.9).add_(results[-1] if results else x, alpha=0.1)
            results.append(layer(x + mean))
        return torch.stack(results)

    return trained(layers, loss)


def greedy_layers():
    """Each layer learns by a head of its own from the detached result of the layer before it."""
    layers, heads = (nn.ModuleList(nn.Linear(24, wide) for _ in range(6)) for wide in (24, 8))
    x = torch.randn(32, 24)

    def loss():
        h, results = x, []
        for layer, head in zip(layers, heads, strict=True):
            h = layer(h.detach()).tanh()
            results.append(head(h))
        return torch.stack(results)

    return trained(nn.ModuleList([layers, heads]), loss)


def layers_without_gradients():
    """Frozen layers follow each other, and a trained head sees the result of each of them."""
    layers, heads = (nn.ModuleList(nn.Linear(24, wide) for _ in range(6)) for wide in (24, 8))
    x = torch.randn(32, 24)

    def loss():
        h, results = x, []
        for layer, head in zip(layers, heads, strict=True):
            with torch.no_grad():
                h = layer(h).tanh()
            results.append(head(h))
        return torch.stack(results)

    return trained(heads, loss)


def exits_in_training():
    """A head sees each layer's result, and another one the last of them."""
    layers, heads = (nn.ModuleList(nn.Linear(24, wide) for _ in range(6)) for wide in (24, 8))
    last, x = nn.Linear(24, 8), torch.randn(32, 24)

    def loss():
        h, results = x, []
        for layer, head in zip(layers, heads, strict=True):
            h = layer(h).tanh()
            results.append(head(h))
        return torch.stack(results).mean(0) + last(h)

    return trained(nn.ModuleList([layers, heads, last]), loss)


def another_list():
    """Four layers follow each other, and then coordinates that were made before are joined."""
    layers, x = mlp(24, 24, 24, 24, 24), torch.randn(32, 24)
    corners = [one.clone() for one in torch.rand(32, 4).unbind(-1)]

    def loss():
        h = layers(x)
        return torch.stack(corners, -1).mean() * h

    return trained(layers, loss)


def exits():
    """A head sees each layer's result."""
    layers, heads = (nn.ModuleList(nn.Linear(24, wide) for _ in range(6)) for wide in (24, 8))
    x = torch.randn(32, 24)

    @torch.no_grad()
    def step():
        h, results = x, []
        for layer, head in zip(layers, heads, strict=True):
            h = layer(h).tanh()
            results.append(head(h))
        return torch.stack(results).mean()

    return step


def features_and_others():
    """The result of the last of four layers is joined with three other tensors."""
    layers, x, others = mlp(16, 16, 16, 16, 16), torch.randn(32, 16), [torch.randn(32, 24) for _ in range(3)]
    return trained(layers, lambda: torch.cat([layers(x), *others], -1))


# By folder, the programs that have the weakness unless they are told otherwise, and those that do not have it.
PROGRAMS = {
    "left_gradients": (
        (head_alone, teacher, condition),
        (loss_network, accumulation, shared_layer, every_second_step, biases_alone, zeroed_by_hand,
         inputs_with_gradients),
    ),
    "module_calls": ((), (refinement, two_views, shared_words)),
    "equal_passes": ((sample_loop, tables), ()),
    "joined_passes": (
        (),
        (experts, experts_before_their_gate, networks_of_variables, actors, hidden_states, cascade,
         own_head_of_each_state, one_actor, layers_in_turn, skip_over_all, state_after_each_forecast, running_mean,
         greedy_layers, layers_without_gradients, exits_in_training, another_list, exits, features_and_others),
    ),
    "float64": ((products, stencil, kernel), ()),
    "indices": ((recurrence, scan, heads), (first_tokens,)),
}  # fmt: skip
# Loops over time, of which no trace is kept: test_data_flow.py observes them.
OBSERVED = (
    times, times_with_layers, last_result_detached, last_result_picked, last_result_without_gradients,
    state_of_an_encoder, own_layers, leaky, layers_around_a_cell, layers_under_autocast, losses_in_each_pass,
    scores_subtracted, layers_with_a_context, result_fed_back, image_fed_back, state_without_its_history,
    average_of_features, state_first, detached_state_first, frozen_state_first, centered_inputs, part_fed_back,
    fast_weights, update_in_each_pass,
)  # fmt: skip
APART, WITH_MODULES = ("float64", "indices"), ("module_calls", "joined_passes")


def record(step, file, apart=False, with_modules=False):
    """Write the trace of three warm steps. apart: their shapes are those of other steps, as record-trace has them.

    with_modules: of torch's Python functions, the calls of modules are kept.
    """
    files = [file.with_suffix(".json.gz"), file.with_suffix(".with_shapes.gz")]
    for path, with_shapes in zip(files, (False, True), strict=True) if apart else [(files[0], True)]:
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=3, warmup=1, active=3),
            record_shapes=with_shapes,
            with_stack=with_modules,
            on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
        ) as profiler:
            for _ in range(7):
                step()
                profiler.step()
        content = file.read_bytes()
        if with_modules:
            document = json.loads(content)
            document["traceEvents"] = [one for one in document["traceEvents"] if not is_of_a_file(one)]
            content = json.dumps(document).encode()
        path.write_bytes(gzip.compress(content, mtime=0))
        file.unlink()
    if apart:
        put_into(*files)
        files[1].unlink()


def is_of_a_file(event):
    return event.get("cat") == "python_function" and not event["name"].startswith("nn.Module: ")


def main(names):
    torch.set_num_threads(1)
    for name in names or PROGRAMS:
        folder = Path(__file__).parent / "traces/cpu" / name
        folder.mkdir(exist_ok=True)
        (weak, others), apart = PROGRAMS[name], name in APART
        for program in weak:
            record(program(True), folder / f"{program.__name__}.json", apart)
            record(program(False), folder / f"{program.__name__}_without.json", apart)
        for program in others:
            record(program(), folder / f"{program.__name__}.json", apart, name in WITH_MODULES)


if __name__ == "__main__":
    main(sys.argv[1:])
