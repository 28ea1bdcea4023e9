//! Response body that is written while it is sent, so that a large mesh does not exhaust the
//! memory.

use std::io::{self, Write};

use axum::body::{Body, Bytes};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Size of a piece in bytes, and maximum number of pieces that wait for the client.
const PIECE_BYTES: usize = 64 * 1024;
const PIECES_MAX: usize = 4;

/// Returns the body that `write` produces on a blocking thread. If the client disconnects, the
/// writer returns an error.
pub(super) fn body(write: impl FnOnce(&mut BodyWriter) -> io::Result<()> + Send + 'static) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    tokio::task::spawn_blocking(move || {
        let mut pieces = BodyWriter { sender, piece: Vec::new() };
        let written = write(&mut pieces).and_then(|()| pieces.flush());
        if let Err(error) = written {
            // A truncated answer must not look complete. If the client has disconnected, sending
            // fails.
            let _ = pieces.sender.blocking_send(Err(error));
        }
    });
    Body::from_stream(ReceiverStream::new(receiver))
}

/// Writer that sends its bytes in pieces.
pub(super) struct BodyWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = Bytes::from(std::mem::take(&mut self.piece));
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        self.sender.blocking_send(Ok(piece)).map_err(gone)
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    #[tokio::test]
    async fn a_large_answer_comes_whole_in_pieces() {
        let size = 3 * PIECES_MAX * PIECE_BYTES + 1;
        let body = body(move |pieces| (0..size).try_for_each(|_| pieces.write_all(b"x")));
        let bytes = to_bytes(body, usize::MAX).await.expect("a body");
        assert_eq!(bytes.len(), size);
    }

    #[tokio::test]
    async fn an_answer_that_fails_half_way_does_not_end_like_a_whole_one() {
        let body = body(|pieces| {
            pieces.write_all(b"half")?;
            Err(io::Error::other("no more"))
        });
        to_bytes(body, usize::MAX).await.expect_err("an error");
    }

    #[tokio::test]
    async fn a_client_that_goes_away_ends_the_writing() {
        let (reported, ended) = tokio::sync::oneshot::channel();
        drop(body(move |pieces| {
            let written = (0..1_000_000).try_for_each(|_| pieces.write_all(&[0; 1024]));
            let _ = reported.send(written.is_err());
            written
        }));
        assert!(ended.await.expect("an end"));
    }
}
