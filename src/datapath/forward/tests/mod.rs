//! Tests of a connection's turns: a model, idle hours, mended defects, bounds, windows, pauses,
//! peers that take nothing, and a panic.

mod blocked;
mod idle;
mod mended;
mod model;
mod panic;
mod paused;
mod rig;
mod turns;
mod windows;
mod wire;

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::datapath::DataPath;
use crate::datapath::accept::ConnectionResources;
use crate::datapath::dial::{DenyList, Upstream};
use crate::datapath::forward::establish::NewTunnel;
use crate::datapath::handshake::Transport;
use crate::datapath::identity::Peer;
use crate::datapath::limits::load::LoadGuard;
use crate::datapath::tests::{FAR, data_path_of, descriptor, metric, peer, target_of};
use crate::reason::Reason;
use crate::snapshot::Publisher;
use crate::snapshot::builder::Change;
use crate::telemetry::Record;
use crate::tls::record::RecordLayer;
use crate::wire::Authority;
