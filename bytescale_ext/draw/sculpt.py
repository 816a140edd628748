"""Picture of the clusters of a corpus: a map of its documents, and the number of tokens of each cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.draw.figure import BLUE, PADDING, hue_colour, new_figure, save, set_grid, set_title

_COLOURED: Final = 12  # clusters that have their own colour
_DRAWN: Final = 5000  # pieces of documents in the map, at most


def draw_clusters(vectors: np.ndarray, cluster: np.ndarray, tokens: np.ndarray, path: Path) -> None:
    """Draw the pieces of documents as dots in their first two principal components, and the clusters as bars.

    The largest clusters are coloured. If there are more than 5000 pieces, the map shows an even sample.

    Args:
        vectors: embedding of each piece of a document, [n, d].
        cluster: cluster of each piece, [n].
        tokens: number of tokens of each piece, [n].
        path: file to write.

    Raises:
        ValueError: the file cannot be written.
    """
    figure, (scatter, bars) = new_figure(11.0, 4.8, columns=2)
    sizes = np.bincount(cluster, weights=tokens)
    by_size = np.argsort(-sizes, kind="stable")
    shown = np.arange(0, len(vectors), -(-len(vectors) // _DRAWN))
    points = principal_components(vectors)[shown]
    for number, coloured in enumerate(by_size[:_COLOURED].tolist()):
        members = points[cluster[shown] == coloured]
        scatter.scatter(members[:, 0], members[:, 1], s=9, color=hue_colour(number, 0.5, 0.6), zorder=2)
    others = points[~np.isin(cluster[shown], by_size[:_COLOURED])]
    scatter.scatter(others[:, 0], others[:, 1], s=3, color=PADDING, zorder=1)
    scatter.set_xticks([])
    scatter.set_yticks([])
    scatter.set_xlabel("first principal component of the embeddings")
    scatter.set_ylabel("second principal component")
    set_title(scatter, f"documents; the {min(_COLOURED, len(sizes))} largest of {len(sizes)} clusters in colour")
    most = sizes.max(initial=0.0)
    scale, unit = (1e6, " (millions)") if most >= 1e6 else (1e3, " (thousands)") if most >= 1e4 else (1.0, "")
    bars.bar(np.arange(len(sizes)), sizes[by_size] / scale, width=1.0, color=BLUE)
    set_grid(bars, "y")
    bars.set_xlabel("cluster, by size")
    bars.set_ylabel(f"tokens{unit}")
    set_title(bars, "tokens of each cluster")
    save(figure, path)


def principal_components(vectors: np.ndarray) -> np.ndarray:
    """Return the first two principal components, [n, 2], of vectors [n, d]. The second is zero if d is 1."""
    centred = vectors - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)  # by ascending eigenvalue
    components = np.zeros((len(vectors), 2))
    main = directions[:, ::-1][:, :2]
    components[:, : main.shape[1]] = centred @ main
    return components
