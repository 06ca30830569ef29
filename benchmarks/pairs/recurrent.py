"""Training and inference with a Python loop over time, whose passes depend on each other through a state."""

import torch
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32
from torch import nn
from torch.distributions import Normal, kl_divergence


def training(model, compute_loss, change, lr=1e-3, clip=None, log=None):
    """Return a step that trains `model` with Adam; `log`, a list, gets the loss as a number."""
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=lr,
        fused=True if change == "fused_adam" else None,
        capturable=change == "graph" and device.type == "cuda",
    )

    def step():
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if log is not None:
            log.append(loss.item())
        return loss.detach()

    return graphed(step) if change == "graph" else step


# --- Speech recognition: attention decoder with scheduled sampling ------------------------------------------
# No inputs_first: the token that is embedded is, for a random part of the batch, the decoder's own last
# output, and the LSTM takes it together with the attention's context, which depends on the state.


class Speller(nn.Module):
    def __init__(self, mels, vocabulary, width):
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv1d(mels, width, 5, 2, 2), nn.ReLU(), nn.Conv1d(width, width, 5, 2, 2), nn.ReLU()
        )
        self.listen = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.key, self.query = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)
        self.embed = nn.Embedding(vocabulary, width // 2)
        self.init_h, self.init_c = nn.Linear(width, width), nn.Linear(width, width)
        self.cell = nn.LSTMCell(width // 2 + width, width)
        self.head = nn.Linear(2 * width, vocabulary)

    def attend(self, h, keys, memory):
        energy = self.score(torch.tanh(keys + self.query(h).unsqueeze(1)))
        weights = energy.softmax(1)
        return (weights.transpose(1, 2) @ memory).squeeze(1)

    def forward(self, mel, tokens, own_share, attend, loss_last):
        memory, _ = self.listen(self.subsample(mel).transpose(1, 2))
        keys = self.key(memory)
        h, c = torch.tanh(self.init_h(memory.mean(1))), self.init_c(memory.mean(1))
        context, last, loss, outputs = memory.mean(1), tokens[:, 0], 0, []
        for t in range(1, tokens.shape[1]):
            h, c = self.cell(torch.cat([self.embed(last), context], 1), (h, c))
            context = attend(h, keys, memory)
            logits = self.head(torch.cat([h, context], 1))
            if loss_last:
                outputs.append(logits)
            else:
                loss = loss + F.cross_entropy(logits, tokens[:, t])
            use_own = torch.rand(len(tokens), device=tokens.device) < own_share
            last = torch.where(use_own, logits.argmax(1), tokens[:, t])
        if loss_last:
            return F.cross_entropy(torch.stack(outputs, 1).flatten(0, 1), tokens[:, 1:].flatten())
        return loss / (tokens.shape[1] - 1)


def speech_speller(change):
    """Speech recognition: listen-attend-spell, LSTMCell with additive attention and scheduled sampling."""
    if change == "tf32":
        use_tf32()
    batch, vocabulary = size(32, 3), size(1000, 11)
    model = Speller(80, vocabulary, size(512, 16)).to(device)
    mel = torch.randn(batch, 80, size(320, 24), device=device)
    tokens = torch.randint(vocabulary, (batch, size(46, 6)), device=device)
    attend = compiled(model.attend) if change == "attention_compiled" else model.attend
    return training(model, lambda: model(mel, tokens, 0.2, attend, change == "loss_last"), change, clip=5.0)


# --- Model-based control: recurrent state-space model of camera frames, under autocast ----------------------


class WorldModel(nn.Module):
    def __init__(self, depth, actions, width, latent, validate):
        super().__init__()
        self.width, self.latent, self.validate = width, latent, validate
        flat = 4 * depth * 8 * 8
        self.encoder = nn.Sequential(
            nn.Conv2d(3, depth, 4, 2, 1),
            nn.ELU(),
            nn.Conv2d(depth, 2 * depth, 4, 2, 1),
            nn.ELU(),
            nn.Conv2d(2 * depth, 4 * depth, 4, 2, 1),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(flat, width),
        )
        self.mix = nn.Sequential(nn.Linear(latent + actions, width), nn.ELU())
        self.gru = nn.GRUCell(width, width)
        self.prior = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 2 * latent))
        self.posterior = nn.Sequential(nn.Linear(2 * width, width), nn.ELU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(
            nn.Linear(width + latent, flat),
            nn.Unflatten(1, (4 * depth, 8, 8)),
            nn.ConvTranspose2d(4 * depth, 2 * depth, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose2d(2 * depth, depth, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose2d(depth, 3, 4, 2, 1),
        )

    def normal(self, parameters):
        mean, std = parameters.float().chunk(2, -1)
        return Normal(mean, F.softplus(std) + 0.1, validate_args=self.validate)

    def forward(self, frames, actions, inputs_first, heads_last):
        length, batch = frames.shape[:2]
        h = torch.zeros(batch, self.width, device=frames.device)
        z = torch.zeros(batch, self.latent, device=frames.device)
        if inputs_first:
            embedded = self.encoder(frames.flatten(0, 1)).unflatten(0, (length, batch))
        divergences, states, reconstructions = [], [], []
        for t in range(length):
            embedding = embedded[t] if inputs_first else self.encoder(frames[t])
            h = self.gru(self.mix(torch.cat([z, actions[t]], -1)), h)
            prior = self.normal(self.prior(h))
            posterior = self.normal(self.posterior(torch.cat([h, embedding], -1)))
            z = posterior.rsample()
            divergences.append(kl_divergence(posterior, prior).sum(-1))
            state = torch.cat([h, z], -1)
            if heads_last:
                states.append(state)
            else:
                reconstructions.append(self.decoder(state))
        if heads_last:
            decoded = self.decoder(torch.cat(states)).unflatten(0, (length, batch))
        else:
            decoded = torch.stack(reconstructions)
        return F.mse_loss(decoded.float(), frames) + 0.01 * torch.stack(divergences).mean()


def world_model(change):
    """Model-based reinforcement learning: a recurrent state-space model of camera frames, autocast."""
    length, batch = size(20, 4), size(32, 2)
    model = WorldModel(size(32, 4), 6, size(400, 16), size(32, 4), False if change == "no_validation" else None).to(
        device
    )
    frames = torch.rand(length, batch, 3, 64, 64, device=device)
    actions = torch.randn(length, batch, 6, device=device)

    def compute_loss():
        with torch.autocast(device.type, torch.bfloat16):
            return model(frames, actions, change == "inputs_first", change == "heads_last")

    return training(model, compute_loss, change, lr=6e-4, clip=100.0)


# --- Video prediction: ConvLSTMs that see only the error of their own prediction ----------------------------
# No inputs_first: the first convolution takes the difference of the frame and the last pass's prediction.


class ConvLSTMCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.gates = nn.Conv2d(inputs + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x, state):
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class PredictiveCoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.stem = nn.Conv2d(6, hidden, 5, 2, 2)
        self.low, self.down = ConvLSTMCell(hidden, hidden), nn.Conv2d(hidden, hidden, 3, 2, 1)
        self.high, self.up = ConvLSTMCell(hidden, 2 * hidden), nn.ConvTranspose2d(2 * hidden, hidden, 4, 2, 1)
        self.predict = nn.ConvTranspose2d(2 * hidden, 3, 4, 2, 1)

    def forward(self, error, low, high):
        low = self.low(F.relu(self.stem(torch.cat([F.relu(error), F.relu(-error)], 1))), low)
        high = self.high(F.relu(self.down(low[0])), high)
        prediction = torch.sigmoid(self.predict(torch.cat([low[0], F.relu(self.up(high[0]))], 1)))
        return prediction, low, high


def video_prediction(change):
    """Next-frame prediction of video by two ConvLSTM levels that take the last prediction's error."""
    batch, edge, hidden = size(32, 2), size(64, 16), size(64, 4)
    model = PredictiveCoder(hidden).to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    cell = compiled(model) if change == "cell_compiled" else model
    video = torch.rand(batch, size(20, 4), 3, edge, edge, device=device)

    def zeros(channels, scale):
        return torch.zeros(batch, channels, edge // scale, edge // scale, device=device)

    def compute_loss():
        low = zeros(hidden, 2), zeros(hidden, 2)
        high = zeros(2 * hidden, 4), zeros(2 * hidden, 4)
        prediction, losses = zeros(3, 1), []
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            for i, frame in enumerate(video.unbind(1)):
                if change == "channels_last":
                    frame = frame.contiguous(memory_format=torch.channels_last)
                error = frame - prediction
                if i > 0:
                    losses.append(error.abs().mean())
                prediction, low, high = cell(error, low, high)
        return torch.stack(losses).mean()

    return training(model, compute_loss, change)


# --- Reinforcement learning: PPO update of a recurrent policy -----------------------------------------------


class RecurrentPolicy(nn.Module):
    def __init__(self, observation, actions, width):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(observation, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.ReLU(),
        )
        self.gru = nn.GRUCell(width, width)
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, outputs))
            for outputs in (actions, 1)
        )

    def forward(self, observations, masks, h, change):
        if change == "inputs_first":
            observations = self.encoder(observations)
        hs, logits, values = [], [], []
        for x_t, m_t in zip(observations.unbind(0), masks.unbind(0), strict=False):
            features = x_t if change == "inputs_first" else self.encoder(x_t)
            h = self.gru(features, h * m_t)  # A new episode starts with a state of zeros.
            if change == "heads_last":
                hs.append(h)
            else:
                logits.append(self.actor(h))
                values.append(self.critic(h))
        if change == "heads_last":
            hs = torch.stack(hs)
            return self.actor(hs), self.critic(hs).squeeze(-1)
        return torch.stack(logits), torch.stack(values).squeeze(-1)


def recurrent_policy(change):
    """Reinforcement learning: one PPO update of a GRUCell policy on a rollout with episode masks."""
    if change == "tf32":
        use_tf32()
    length, envs, observation, actions, width = size(48, 5), size(256, 4), size(512, 12), 8, size(512, 16)
    model = RecurrentPolicy(observation, actions, width).to(device)
    observations = torch.randn(length, envs, observation, device=device)
    masks = (torch.rand(length, envs, 1, device=device) > 0.02).float()
    taken = torch.randint(actions, (length, envs, 1), device=device)
    advantages, returns = torch.randn(length, envs, device=device), torch.randn(length, envs, device=device)
    old_log_prob = torch.full((length, envs), 1 / actions, device=device).log()
    start = torch.randn(envs, width, device=device)

    def compute_loss():
        logits, values = model(observations, masks, start, change)
        log_probs = logits.log_softmax(-1)
        log_prob = log_probs.gather(-1, taken).squeeze(-1)
        ratio = (log_prob - old_log_prob).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        return policy_loss + 0.5 * F.mse_loss(values, returns) - 0.01 * entropy

    return training(model, compute_loss, change, lr=3e-4, clip=0.5, log=[])


# --- Neuromorphic computing: spiking network with surrogate gradients and truncated backpropagation ---------


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


class Spiking(nn.Module):
    """Two layers of leaky integrate-and-fire neurons, the first one recurrent, and a readout."""

    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.fc_in, self.recurrent = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden, bias=False)
        self.fc_2, self.readout = nn.Linear(hidden, hidden), nn.Linear(hidden, classes)
        for layer in (self.fc_in, self.fc_2):  # With PyTorch's own initial weights, hardly any neuron fires.
            nn.init.normal_(layer.weight, std=2 / layer.in_features**0.5)
        self.leak = nn.Parameter(torch.full((hidden,), 2.0))
        self.state = None

    def reset(self, batch):
        zeros = torch.zeros(batch, len(self.leak), device=self.leak.device)
        self.state = zeros, zeros, zeros, zeros

    def detach(self):
        self.state = tuple(s.detach() for s in self.state)

    def update(self, current, v1, s1, v2, s2):
        leak = torch.sigmoid(self.leak)
        v1 = leak * v1 * (1 - s1) + current + self.recurrent(s1)
        s1 = Spike.apply(v1 - 1)
        v2 = leak * v2 * (1 - s2) + self.fc_2(s1)
        s2 = Spike.apply(v2 - 1)
        return v1, s1, v2, s2


def spiking_audio(change):
    """Spoken digits as spike trains: a spiking network, backpropagation cut every 20 passes."""
    length, batch, inputs, classes = size(60, 6), size(128, 4), size(700, 20), 20
    model = Spiking(inputs, size(512, 16), classes).to(device)
    spikes = (torch.rand(length, batch, inputs, device=device) < 0.05).float()
    labels = torch.randint(classes, (batch,), device=device)
    update = compiled(model.update) if change == "cell_compiled" else model.update

    def compute_loss():
        model.reset(batch)
        votes, fired = 0, []
        for t, x_t in enumerate(model.fc_in(spikes) if change == "inputs_first" else spikes):
            if t % size(20, 3) == 0:
                model.detach()
            current = x_t if change == "inputs_first" else model.fc_in(x_t)
            model.state = update(current, *model.state)
            if change == "heads_last":
                fired.append(model.state[3])
            else:
                votes = votes + model.readout(model.state[3])
        if change == "heads_last":
            votes = model.readout(torch.stack(fired)).sum(0)
        return F.cross_entropy(votes / length, labels)

    return training(model, compute_loss, change)


# --- Radar tracking: Kalman filter with a learned gain, inference -------------------------------------------
# No inputs_first: the networks take the measurement only as its difference from the one that the state
# predicts.


class GainNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3 + 6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.gru = nn.GRUCell(width, width)
        self.gain = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6 * 3))

    def forward(self, innovation, correction, h):
        h = self.gru(self.encode(torch.cat([F.normalize(innovation), F.normalize(correction)], 1)), h)
        return self.gain(h).view(-1, 6, 3), h


def measure(x):
    """Return what a radar sees of positions and speeds: distance, azimuth and elevation."""
    px, py, pz = x[:, 0], x[:, 1], x[:, 2]
    ground = (px**2 + py**2).sqrt()
    return torch.stack([(ground**2 + pz**2).sqrt(), torch.atan2(py, px), torch.atan2(pz, ground)], 1)


def radar_tracking(change):
    """Radar tracking, inference: a Kalman filter with its gain from a GRUCell network on the innovation."""
    if change == "tf32":
        use_tf32()
    tracks, length, width = size(2048, 5), size(80, 6), size(512, 16)
    net = GainNet(width).to(device).eval()
    motion = torch.eye(6, device=device) + 0.1 * torch.eye(6, device=device).roll(3, 1).triu()
    truth = [torch.randn(tracks, 6, device=device) + 5]
    for _ in range(length):
        truth.append(truth[-1] @ motion.T + 0.01 * torch.randn(tracks, 6, device=device))
    truth = torch.stack(truth, 1)
    seen = torch.stack([measure(x) for x in truth.unbind(1)], 1)
    seen = seen + 0.01 * torch.randn_like(seen)
    keep_tensors = change in ("no_item", "graph")

    @torch.no_grad()
    def step():
        x, correction = truth[:, 0], torch.zeros(tracks, 6, device=device)
        h, errors = torch.zeros(tracks, width, device=device), []
        for t in range(1, length + 1):
            predicted = x @ motion.T
            innovation = seen[:, t] - measure(predicted)
            gain, h = net(innovation, correction, h)
            correction = (gain @ innovation.unsqueeze(2)).squeeze(2)
            x = predicted + correction
            error = (x[:, :3] - truth[:, t, :3]).norm(dim=1).mean()
            errors.append(error if keep_tensors else error.item())
        return torch.stack(errors).mean() if keep_tensors else torch.tensor(errors).mean()

    return graphed(step) if change == "graph" else step


# --- Intensive care: GRU with decay for measurements with gaps ----------------------------------------------


class GRUD(nn.Module):
    def __init__(self, variables, hidden, labels):
        super().__init__()
        self.x_decay_weight, self.x_decay_bias = (nn.Parameter(torch.rand(variables)) for _ in range(2))
        self.h_decay = nn.Linear(variables, hidden)
        self.register_buffer("x_mean", torch.zeros(variables))
        self.x2g, self.h2g = nn.Linear(2 * variables, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.h0 = nn.Parameter(torch.zeros(hidden))
        self.head = nn.Sequential(nn.Linear(hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, labels))

    def prepare(self, x, mask, gap):
        """Fill in missing values, and return the gates' inputs and the decay of the state."""
        x_decay = torch.exp(-F.relu(self.x_decay_weight * gap + self.x_decay_bias))
        h_decay = torch.exp(-F.relu(self.h_decay(gap)))
        x = mask * x + (1 - mask) * (x_decay * x + (1 - x_decay) * self.x_mean)
        return self.x2g(torch.cat([x, mask], -1)), h_decay

    def update(self, gates, h_decay, h):
        h = h_decay * h
        xr, xz, xn = gates.chunk(3, 1)
        hr, hz, hn = self.h2g(h).chunk(3, 1)
        z = torch.sigmoid(xz + hz)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return (1 - z) * n + z * h

    def cell(self, x, mask, gap, h):
        return self.update(*self.prepare(x, mask, gap), h)


def intensive_care(change):
    """Intensive care: a GRU with decay (GRU-D) predicts labels every hour from measurements with gaps."""
    patients, hours, variables, labels = size(256, 4), size(40, 5), size(96, 7), 25
    model = GRUD(variables, size(512, 16), labels).to(device)
    mask = (torch.rand(patients, hours, variables, device=device) < 0.3).float()
    # Where the mask is 0, the values are the last measured ones.
    values = torch.randn(patients, hours, variables, device=device)
    gap = torch.rand(patients, hours, variables, device=device) * 5
    targets = (torch.rand(patients, hours, labels, device=device) < 0.2).float()
    cell = compiled(model.cell) if change == "cell_compiled" else model.cell

    def compute_loss():
        h, hs, logits = model.h0.expand(patients, -1), [], []
        if change == "inputs_first":
            for gates, h_decay in zip(*(p.unbind(1) for p in model.prepare(values, mask, gap)), strict=False):
                h = model.update(gates, h_decay, h)
                logits.append(model.head(h))
        else:
            for x_t, m_t, d_t in zip(values.unbind(1), mask.unbind(1), gap.unbind(1), strict=False):
                h = cell(x_t, m_t, d_t, h)
                if change == "heads_last":
                    hs.append(h)
                else:
                    logits.append(model.head(h))
        logits = model.head(torch.stack(hs, 1)) if hs else torch.stack(logits, 1)
        return F.binary_cross_entropy_with_logits(logits, targets)

    return training(model, compute_loss, change, log=None if change in ("no_item", "graph") else [])


# --- Music: log-likelihood of piano rolls under a selective state-space model, inference --------------------


class SelectiveSSM(nn.Module):
    def __init__(self, notes, width, states):
        super().__init__()
        self.states = states
        self.embed = nn.Sequential(
            nn.Linear(notes, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)
        )
        self.in_proj, self.dt_proj = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.bc_proj = nn.Linear(width, 2 * states, bias=False)
        self.log_a = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))
        self.norm, self.head = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, notes)),
        )

    def inputs(self, notes):
        u, gate = self.in_proj(self.embed(notes)).chunk(2, -1)
        u = F.silu(u)
        b, c = self.bc_proj(u).chunk(2, -1)
        return u, F.silu(gate), F.softplus(self.dt_proj(u)), b, c

    def advance(self, h, u, gate, dt, b, c):
        decay = torch.exp(-dt.unsqueeze(-1) * self.log_a.exp())
        h = decay * h + (dt * u).unsqueeze(-1) * b.unsqueeze(1)
        y = (h * c.unsqueeze(1)).sum(-1) + self.skip * u
        return h, y * gate


@torch.no_grad()
def score_pieces(model, roll, advance, change):
    """Return the mean log-likelihood of the notes of each time slot, given those before."""
    h = torch.zeros(len(roll), *model.log_a.shape, device=roll.device)
    if change == "inputs_first":
        prepared = model.inputs(roll)
    ys, score = [], torch.zeros(len(roll), device=roll.device)
    for t in range(1, roll.shape[1]):
        parts = [p[:, t - 1] for p in prepared] if change == "inputs_first" else model.inputs(roll[:, t - 1])
        h, y = advance(h, *parts)
        if change == "heads_last":
            ys.append(y)
            continue
        logits = model.head(model.norm(y))
        score -= F.binary_cross_entropy_with_logits(logits, roll[:, t], reduction="none").sum(1)
    if change == "heads_last":
        logits = model.head(model.norm(torch.stack(ys, 1)))
        score = -F.binary_cross_entropy_with_logits(logits, roll[:, 1:], reduction="none").sum((1, 2))
    return score.mean() / (roll.shape[1] - 1)


def music_scoring(change):
    """Music, inference: log-likelihood of piano rolls under a selective state-space model."""
    model = SelectiveSSM(88, size(768, 16), size(16, 4)).to(device).eval()
    roll = (torch.rand(size(128, 3), size(97, 7), 88, device=device) < 0.05).float()
    advance = compiled(model.advance) if change == "cell_compiled" else model.advance
    if change == "graph":
        return graphed(lambda: score_pieces(model, roll, advance, change))
    return lambda: score_pieces(model, roll, advance, change)


PROGRAMS = {
    speech_speller: {"attention_compiled": "fuse_pointwise", "loss_last": "loop_outputs", "tf32": "tf32",
                     "graph": "cuda_graph"},
    world_model: {"inputs_first": "loop_inputs", "heads_last": "loop_outputs", "no_validation": "remove_sync",
                  "fused_adam": "fused_optimizer"},
    video_prediction: {"bf16": "half_precision", "channels_last": "channels_last", "cell_compiled": "fuse_pointwise"},
    recurrent_policy: {"inputs_first": "loop_inputs", "heads_last": "loop_outputs", "tf32": "tf32",
                       "fused_adam": "fused_optimizer"},
    spiking_audio: {"inputs_first": "loop_inputs", "heads_last": "loop_outputs", "cell_compiled": "fuse_pointwise",
                    "graph": "cuda_graph"},
    radar_tracking: {"no_item": "remove_sync", "tf32": "tf32", "graph": "cuda_graph"},
    intensive_care: {"inputs_first": "loop_inputs", "heads_last": "loop_outputs", "cell_compiled": "fuse_pointwise",
                     "no_item": "remove_sync", "graph": "cuda_graph"},
    music_scoring: {"inputs_first": "loop_inputs", "heads_last": "loop_outputs", "cell_compiled": "fuse_pointwise",
                    "graph": "cuda_graph"},
}  # fmt: skip
