"""What a reply must look like before the rounds machine hears of it."""

from __future__ import annotations

from fedmq.errors import RemoteWireError
from fedmq.messages import Delta, Message, Metrics, ModalityPrototypes, PartialDelta, Payload
from fedmq.protocol import Context


def check_reply(message: Message, uploads: frozenset[type[Payload]], context: Context) -> None:
    """Check a reply against what the method lets this silo upload and against the run's layout and dimension.

    Shapes inside one payload were checked in decoding; here they are compared with the run's own.

    Raises:
        RemoteWireError: ``unexpected`` for kinds that are missing, repeated or not asked for; ``layout`` for buffers
            of another layout or size.
    """
    kinds = [type(payload) for payload in message.payloads]
    if frozenset(kinds) != uploads or len(kinds) != len(uploads):
        found = ", ".join(kind.KIND for kind in kinds) or "nothing"
        wanted = ", ".join(sorted(kind.KIND for kind in uploads))
        raise RemoteWireError("unexpected", f"a reply with {found}, allowed: {wanted}")
    for payload in message.payloads:
        match payload:
            case Delta(layout_digest=digest, buffer=buffer, n_samples=samples):
                if samples < 1:
                    raise RemoteWireError("malformed", "a delta of no samples")
                if digest != context.layout.digest or buffer.dtype != "float32" or buffer.size != context.layout.size:
                    raise RemoteWireError(
                        "layout", f"a delta of {buffer.size} {buffer.dtype}, here {context.layout.size} float32"
                    )
            case PartialDelta(layout_digest=digest, names=names, buffer=buffer, n_samples=samples):
                if samples < 1:
                    raise RemoteWireError("malformed", "a partial delta of no samples")
                if digest != context.layout.digest or not set(names) <= set(context.layout.by_name):
                    raise RemoteWireError("layout", "a partial delta of another layout")
                if buffer.dtype != "float32" or buffer.size != context.layout.part(names).size:
                    raise RemoteWireError("layout", f"a partial delta of {buffer.size} {buffer.dtype}")
            case Metrics():
                raise RemoteWireError("unexpected", "metrics nobody asked for")
            case ModalityPrototypes(image=image, text=text):
                if image.size != context.dim or text.size != context.dim:
                    raise RemoteWireError("layout", f"prototypes of {image.size} and {text.size}, here {context.dim}")
            case _:
                pass
