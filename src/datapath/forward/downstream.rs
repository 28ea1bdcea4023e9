//! Parts of a connection that its tunnels use: HTTP/2 state, send buffer and record protection.

use std::io;
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;

use crate::datapath::http2::output::Output;
use crate::datapath::http2::server::{ConnectionError, Server};
use crate::tls::record::{RecordError, RecordLayer};

/// Number of control bytes above which a peer that reads nothing is not read either.
const CONTROL_BYTES_MAX: usize = 16 * 1024;

#[derive(Debug)]
pub enum ConnectionEnd {
    /// Both sides have finished, or the peer has closed its side.
    Closed,
    /// The connection is unused, or its grace period after GOAWAY has passed.
    ClosedByGateway,
    /// The peer does not answer PING.
    Silent,
    /// The peer does not read, and memory runs short.
    Evicted,
    Lost(io::Error),
    /// The peer has violated TLS.
    Record(RecordError),
    Http2(ConnectionError),
}

/// Downstream side of a connection, without its socket.
#[derive(Debug)]
pub struct Downstream {
    /// HTTP/2 state.
    pub server: Server,
    pub output: Output,
    pub layer: RecordLayer,
    /// True if the peer has requested a KeyUpdate.
    pub is_key_update_requested: bool,
    /// Bytes of tunnels that have crossed and are not charged to the cluster yet.
    pub moved: usize,
    /// Limit of the tunnels by the rate of the cluster.
    pub pace: Pace,
}

/// Limit of the tunnels of a connection by the rate of the peer's cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// The cluster has no limit.
    #[default]
    Free,
    /// Receive windows do not grow, so that little passes at the begin of a pause.
    Limited,
    /// Endpoints are not read, and receive windows are not opened.
    Paused,
}

impl Downstream {
    pub fn new(layer: RecordLayer) -> Self {
        Self {
            server: Server::default(),
            output: Output::default(),
            layer,
            is_key_update_requested: false,
            moved: 0,
            pace: Pace::Free,
        }
    }

    /// Returns true if the peer reads nothing and many control frames wait for it.
    pub fn is_stalled(&self) -> bool {
        self.output.is_blocked() && self.server.control.len() > CONTROL_BYTES_MAX
    }

    /// Appends a KeyUpdate that is due, and control frames as far as the output has room.
    pub fn write_control(&mut self) -> Result<(), ConnectionEnd> {
        if self.output.is_blocked()
            || self.server.control.is_empty() && !self.is_key_update_requested
        {
            return Ok(());
        }
        if std::mem::take(&mut self.is_key_update_requested) {
            let updated = self.output.update_key(&mut self.layer);
            updated.map_err(ConnectionEnd::Record)?;
        }
        let room = self.output.control_room().min(self.server.control.len());
        self.output
            .append(&self.server.control[..room], &mut self.layer)
            .map_err(ConnectionEnd::Record)?;
        self.server.control.drain(..room);
        if self.server.control.is_empty() && self.server.control.capacity() > CONTROL_BYTES_MAX {
            self.server.control = Vec::new();
        }
        Ok(())
    }

    /// Sends everything. Returns false if the peer does not take all of it.
    pub fn poll_flush<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Result<bool, ConnectionEnd> {
        loop {
            self.write_control()?;
            match self.output.poll_flush(cx, socket, &mut self.layer) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Err(error)) => return Err(ConnectionEnd::Lost(error)),
                Poll::Ready(Ok(())) => {}
            }
            if self.server.control.is_empty() && !self.is_key_update_requested {
                return Ok(true);
            }
        }
    }
}
