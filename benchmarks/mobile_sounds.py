"""Sounds for networks on phones, made here: tones, chords, and speech that `espeak-ng` (GPL-3+, in Debian) speaks.

Sounds to calibrate on and held-out ones differ in sentences and voices, or in the random numbers they are made from.
"""

from __future__ import annotations

import io
import subprocess
import wave
from collections.abc import Sequence

import numpy as np
import torch
from mobile_texts import sentences
from scipy.signal import resample_poly
from torch import Tensor

RATE = 16_000
"""Samples a second of speech and tones."""
VOICES = (
    ("en-us+m1", "en-gb+f1", "de+m2", "fr+f2", "es+m3", "it+m4", "pl+f5"),
    ("en-us+m5", "en-gb+f3", "nl+m6", "pt+f4", "sv+m7", "en-us+f4"),
)
"""Voices of espeak-ng, to calibrate on and held out."""


def tones(count: int, size: int, seed: int, rate: int = RATE) -> np.ndarray:
    """(count, size) voices of 50 to 1,000 Hz with harmonics and a glide, each in noise of its own level."""
    random, time = np.random.default_rng(seed), np.arange(size) / rate
    pitch = 50 * 20 ** random.random((count, 1)) * (1 + random.normal(0, 0.3, (count, 1)) * time)
    phase, made = 2 * np.pi * np.cumsum(pitch, 1) / rate, np.zeros((count, size))
    decay = random.uniform(0.3, 0.95, (count, 1))
    for harmonic in range(1, 9):
        heard = (harmonic * pitch < rate / 2) * decay**harmonic * random.uniform(0.3, 1, (count, 1))
        made += heard * np.sin(harmonic * phase + random.uniform(0, 2 * np.pi, (count, 1)))
    return made + 10 ** random.uniform(-3, 0, (count, 1)) * random.normal(size=(count, size))


def chords(count: int, size: int, rate: int, seed: int) -> np.ndarray:
    """(count, size) music of one to four voices, whose notes of 0.1 to 0.6 seconds fade like a plucked string's."""
    random, made = np.random.default_rng(seed), np.zeros((count, size))
    for music in made:
        for _ in range(random.integers(1, 5)):
            start = 0
            while start < size:
                length = int(rate * random.uniform(0.1, 0.6))
                time = np.arange(min(length, size - start)) / rate
                pitch = 440 * 2 ** ((random.integers(33, 89) - 69) / 12)
                note = sum(np.sin(2 * np.pi * k * pitch * time) / k ** random.uniform(1, 2.5) for k in range(1, 7))
                music[start : start + len(time)] += random.uniform(0.05, 0.3) * note * np.exp(-3 * time)
                start += length
        music += 10 ** random.uniform(-5, -2) * random.normal(size=size)
    return made


def spoken(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """Speech of a voice, at 16 kHz.

    Raises:
        FileNotFoundError: `espeak-ng` is not installed.
    """
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    heard = subprocess.run(command, capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(heard)) as sound:
        samples = np.frombuffer(heard[44:], np.int16) / 32768
        return resample_poly(samples, RATE // 50, sound.getframerate() // 50)


def speech(voices: Sequence[str], texts: Sequence[str], seed: int) -> list[np.ndarray]:
    """Sentences, each said by one of the voices."""
    random = np.random.default_rng(seed)
    return [
        spoken(text, voices[i % len(voices)], int(random.integers(130, 220)), int(random.integers(20, 80)))
        for i, text in enumerate(texts)
    ]


def talk(count: int, size: int, noise: float, side: int) -> np.ndarray:
    """(count, size) speech with pauses, in noise of which the loudest has `noise` times the amplitude.

    Args:
        side: 0 to calibrate on, 1 held out.
    """
    random, parts, length = np.random.default_rng(side), list[np.ndarray](), 0
    texts = sentences()[side]
    for some in range(0, len(texts), 20):
        for said in speech(VOICES[side], texts[some : some + 20], some):
            parts += [said, np.zeros(int(RATE * random.exponential(0.5)))]
            length += len(parts[-1]) + len(parts[-2])
        if length >= count * size:
            break
    heard = np.resize(np.concatenate(parts), (count, size)) * 10 ** random.uniform(-1, 0, (count, 1))
    return heard + noise * 10 ** random.uniform(-3, 0, (count, 1)) * random.normal(size=heard.shape)


def mel(samples: np.ndarray, window: int, hop: int, bands: int) -> Tensor:
    """(N, frames, bands) power of sounds at 16 kHz by Slaney's mel scale, as librosa computes it."""
    sound, shape = torch.from_numpy(samples).float(), torch.hann_window(window)
    power = torch.stft(sound, window, hop, window=shape, pad_mode="constant", return_complex=True).abs().square()
    edges = _hertz(np.linspace(0, 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4), bands + 2))
    found, width = np.linspace(0, RATE / 2, power.shape[1])[:, None], np.diff(edges)
    up, down = (found - edges[:-2]) / width[:-1], (edges[2:] - found) / width[1:]
    weights = np.maximum(0, np.minimum(up, down)) * 2 / (edges[2:] - edges[:-2])
    return power.transpose(1, 2) @ torch.from_numpy(weights).float()


def _hertz(scale: np.ndarray) -> np.ndarray:
    return np.where(scale < 15, 200 * scale / 3, 1000 * 6.4 ** ((scale - 15) / 27))
