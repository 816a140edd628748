"""A picture of sculpted windows: a map of the clusters of documents, and how many tokens each cluster holds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.draw.figure import BLUE, GRID, PADDING, hue_colour, new_figure, save, set_title

_COLOURED: Final = 12  # clusters with a colour of their own
_DRAWN: Final = 5000  # documents in the map


def draw_clusters(vectors: np.ndarray, cluster: np.ndarray, tokens: np.ndarray, path: Path) -> None:
    """Draw a dot for each piece of a document where its two main directions place it, and a bar for each cluster.

    The largest clusters have colours. Of many pieces every k-th is drawn.

    Args:
        vectors: [n, d] what each piece is about.
        cluster: [n] its cluster.
        tokens: [n] its tokens.
        path: file to write.

    Raises:
        ValueError: the file cannot be written.
    """
    figure, (places, sizes) = new_figure(11.0, 4.8, columns=2)
    held = np.bincount(cluster, weights=tokens)
    largest = np.argsort(-held, kind="stable")
    shown = np.arange(0, len(vectors), -(-len(vectors) // _DRAWN))
    points = plane(vectors)[shown]
    for place, one in enumerate(largest[:_COLOURED].tolist()):
        members = points[cluster[shown] == one]
        places.scatter(members[:, 0], members[:, 1], s=7, color=hue_colour(place, 0.5, 0.6), zorder=2)
    others = points[~np.isin(cluster[shown], largest[:_COLOURED])]
    places.scatter(others[:, 0], others[:, 1], s=3, color=PADDING, zorder=1)
    places.set_xticks([])
    places.set_yticks([])
    set_title(places, f"documents; the {min(_COLOURED, len(held))} largest of {len(held)} clusters in colour")
    sizes.bar(np.arange(len(held)), held[largest], width=1.0, color=BLUE)
    sizes.grid(axis="y", color=GRID, linewidth=0.8)
    sizes.set_axisbelow(True)
    sizes.set_xlabel("cluster")
    sizes.set_ylabel("tokens")
    set_title(sizes, "tokens of each cluster")
    save(figure, path)


def plane(vectors: np.ndarray) -> np.ndarray:
    """Return the place of each vector, [n, 2], in the two directions in which vectors [n, d] differ most."""
    centred = vectors - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)  # the last ones have the largest values
    places = np.zeros((len(vectors), 2))
    main = directions[:, ::-1][:, :2]
    places[:, : main.shape[1]] = centred @ main
    return places
