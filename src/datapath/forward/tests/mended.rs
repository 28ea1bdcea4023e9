//! Defects that a review has found, each with its situation.

use std::future::pending;
use std::thread;

use super::rig::{CONNECT, Rig, TestGateway, drain, exposure, fill, mesh};
use super::wire::{
    ACK, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HANDSHAKE, HEADERS, PING, PRIORITY,
    RST_STREAM, Received, WINDOW_UPDATE,
};
use super::*;
use crate::datapath::forward::connection::load_current;
use crate::datapath::io::buffer::BUFFER_BYTES;
use crate::outer::tests::robustness::ended_tunnel;
use crate::tls::tests::samples::{OWN, authority, certificates, leaf, material, trusting};

const DEADLINE: Duration = Duration::from_secs(10);
const PROTOCOL_ERROR: u32 = 1;
const INTERNAL_ERROR: u32 = 2;
const FRAME_SIZE_ERROR: u32 = 6;
const CONNECT_ERROR: u32 = 10;
const ENHANCE_YOUR_CALM: u32 = 11;

/// Returns the frames that the peer has received.
pub(super) fn frames(rig: &mut Rig) -> Vec<Frame> {
    let received = rig.peer.receive().into_iter();
    received
        .filter_map(|message| match message {
            Received::Frame(frame) => Some(frame),
            _ => None,
        })
        .collect()
}

fn kinds(frames: &[Frame]) -> Vec<u8> {
    frames.iter().map(|frame| frame.kind).collect()
}

fn ping(number: u16) -> Frame {
    let [high, low] = number.to_be_bytes();
    Frame::new(PING, 0, 0, &[0, 0, 0, 0, 0, 0, high, low])
}

/// Resolves a tunnel to a local endpoint, changes the configuration, and dials.
async fn establish_after(change: Change) -> (Result<Upstream, Reason>, NewTunnel) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let publisher = Publisher::default();
    publisher.update(mesh([("echo", listener.local_addr().expect("an address"))]));
    let deny = DenyList::new(vec!["127.0.0.0/8".parse().expect("a network")], Vec::new());
    let data_path = data_path_of(publisher.reader(), deny);
    let peer = Arc::new(Peer {
        holders: Some(descriptor(&data_path).holders().clone()),
        ..(*peer(SystemTime::now() + FAR)).clone()
    });
    let record = Record::new(&data_path.metrics, &peer.source, "echo.app:80");
    let mut tunnel = NewTunnel::new(&data_path, &peer, record);
    let target = target_of("echo.app:80", None);
    let (permit, _) = tunnel.resolve(Ok(target)).expect("a permit");
    publisher.update(change);
    let established = timeout(DEADLINE, tunnel.establish(permit, pending()));
    (established.await.expect("an end in time"), tunnel)
}

#[tokio::test]
async fn a_permission_that_is_withdrawn_before_the_endpoint_answers_opens_no_tunnel() {
    let (opened, _) = establish_after(Change::default()).await;
    assert!(opened.is_ok(), "{opened:?}");
    let withdrawn = Change { exposure: Some(exposure(&[])), ..Change::default() };
    let removed = mesh([("other", ([10, 0, 0, 1], 80).into())]);
    for change in [withdrawn, removed] {
        let (opened, _) = establish_after(change).await;
        assert_eq!(opened.err(), Some(Reason::Revoked));
    }
    let other = Change { exposure: Some(exposure(&["echo", "other"])), ..Change::default() };
    let (opened, tunnel) = establish_after(other).await;
    assert!(opened.is_ok(), "{opened:?}");
    let now = tunnel.data_path.reader.load().generation;
    assert_eq!(tunnel.generation, now, "it is evaluated once");
}

#[test]
fn a_change_during_a_check_is_reported_again() {
    const CHANGES: usize = 500;
    let publisher = Publisher::default();
    publisher.update(mesh([("echo", ([10, 0, 0, 1], 80).into())]));
    let (reader, has_ended) = (publisher.reader(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let names: [&[&str]; 2] = [&[], &["echo"]];
            for names in names.iter().cycle() {
                if has_ended.load(Ordering::Relaxed) {
                    return;
                }
                publisher.update(Change { exposure: Some(exposure(names)), ..Change::default() });
            }
        });
        let (mut seen, mut changes, mut is_current) = (reader.generation(), 0, true);
        while is_current && changes < CHANGES {
            let before = *seen.borrow();
            let (generation, snapshot) = load_current(&reader, &mut seen);
            is_current = snapshot.generation >= generation;
            changes += usize::from(generation != before);
        }
        has_ended.store(true, Ordering::Relaxed);
        assert!(is_current, "an older snapshot was evaluated as a newer one");
    });
}

#[tokio::test(start_paused = true)]
async fn the_answer_precedes_the_last_bytes_of_an_endpoint() {
    let mut rig = Rig::established(&TestGateway::new()).await;
    rig.send(Frame::new(HEADERS, END_HEADERS, 1, CONNECT)).await;
    rig.send(Frame::new(DATA, 0, 1, b"early")).await;
    frames(&mut rig);
    rig.accept(1).unwrap();
    let mut far = rig.open(1, None).unwrap();
    assert_eq!(fill(&mut far, b"last"), 4);
    drop(far);
    // The gateway's socket learns of the end before its connection has its turn.
    yield_now().await;
    yield_now().await;
    rig.pump().await;
    let frames = frames(&mut rig);
    assert_eq!(kinds(&frames), [HEADERS, DATA, RST_STREAM]);
    assert_eq!(frames[1].payload, b"last");
    assert_eq!(frames[2].number(0), CONNECT_ERROR);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_was_not_read_while_it_did_not_read_is_read_again() {
    const PINGS: u16 = 1_100;
    let mut rig = Rig::established(&TestGateway::new()).await;
    frames(&mut rig);
    rig.peer.set_room(0);
    // The first answer blocks the output.
    rig.send(ping(0)).await;
    for number in 1..PINGS {
        rig.peer.send(&ping(number).encode());
    }
    rig.pump().await;
    assert!(rig.peer.is_read(), "these fill the control frames");
    rig.send(ping(PINGS)).await;
    assert!(!rig.peer.is_read(), "a limit of control frames");
    rig.peer.set_room(usize::MAX);
    rig.pump().await;
    let frames = frames(&mut rig);
    assert_eq!(frames.len(), usize::from(PINGS) + 1);
    assert_eq!(frames.last().unwrap().payload, ping(PINGS).payload);
}

#[tokio::test(start_paused = true)]
async fn the_memory_of_a_part_of_a_record_is_charged() {
    const LARGE: usize = 5000;
    let gateway = TestGateway::new();
    let budget = &gateway.data_path.budget;
    let mut rig = Rig::established(&gateway).await;
    assert_eq!(budget.held(), 0);
    // An unknown type of frame.
    let frame = Frame::new(0x42, 0, 0, &[0; LARGE]).encode();
    let length = u16::try_from(frame.len() + 17).unwrap().to_be_bytes();
    let record = [&[23, 3, 3][..], &length, &frame, &[23], &[0; 16]].concat();
    for (part, held) in [(15, 0), (3000, 3000), (LARGE, BUFFER_BYTES)] {
        rig.peer.send_raw(&record[..15]);
        rig.pump().await;
        assert_eq!(budget.held(), 0, "too little to be reported");
        rig.peer.send_raw(&record[15..part]);
        rig.pump().await;
        assert_eq!(budget.held(), held, "{part} bytes");
        rig.peer.send_raw(&record[part..]);
        rig.pump().await;
        assert_eq!(budget.held(), 0);
    }
    rig.peer.send_raw(&record[..LARGE]);
    rig.pump().await;
    assert_eq!(budget.held(), BUFFER_BYTES);
    drop(rig);
    assert_eq!(budget.held(), 0, "the connection has ended");
}

#[tokio::test(start_paused = true)]
async fn tunnels_take_turns_in_a_small_window_of_the_connection() {
    const WINDOW: u32 = 40 * 1024;
    let gateway = TestGateway::new();
    let mut rig = Rig::established(&gateway).await;
    let mut ends = Vec::new();
    for id in [1, 3, 5, 7] {
        ends.push(rig.tunnel(id).await);
        // The first one is stalled, because its reader does not read.
        let window: u32 = if id == 1 { 1 } else { 1 << 30 };
        let window = window.to_be_bytes();
        rig.send(Frame::new(WINDOW_UPDATE, 0, id, &window)).await;
    }
    let mut bytes = [0; 4];
    for _ in 0..60 {
        for end in &mut ends {
            fill(end, &[7; 64 * 1024]);
        }
        rig.pump().await;
        for frame in frames(&mut rig) {
            if frame.kind == DATA {
                bytes[frame.stream as usize / 2] += frame.payload.len();
            }
        }
        rig.send(Frame::new(WINDOW_UPDATE, 0, 0, &WINDOW.to_be_bytes())).await;
    }
    assert!(bytes[1..].iter().all(|&count| count > 10 * WINDOW as usize), "{bytes:?}");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_loses_trust_during_a_setup_gets_no_tunnel() {
    let gateway = TestGateway::new();
    let (tls, authority) = (&gateway.data_path.tls, authority());
    let own = material(&leaf(&authority, "east", OWN), &authority.root_pem());
    tls.replace(trusting(&own, &["w"]));
    let chain = certificates(&leaf(&authority, "west", "spiffe://w/ns/n/sa/c").chain_pem);
    let mut rig = Rig::established(&gateway).await;
    rig.identity = Arc::new(Peer {
        chain: Some(tls.register_chain(&chain).unwrap()),
        ..(*rig.identity).clone()
    });
    drop(rig.tunnel(1).await);
    rig.send(Frame::new(HEADERS, END_HEADERS, 3, CONNECT)).await;
    frames(&mut rig);
    rig.accept(3).unwrap();
    let mut far = rig.open(3, None).unwrap();
    tls.replace(trusting(&own, &["other"]));
    tls.recheck(|_| ());
    rig.pump().await;
    let frames = frames(&mut rig);
    assert_eq!(kinds(&frames), [HEADERS, RST_STREAM]);
    assert_eq!(frames[1].number(0), INTERNAL_ERROR);
    assert!(drain(&mut far, &mut Vec::new()), "the endpoint is closed");
}

#[tokio::test(start_paused = true)]
async fn the_alert_follows_all_frames_of_a_peer_that_reads_late() {
    let mut rig = Rig::established(&TestGateway::new()).await;
    frames(&mut rig);
    rig.peer.set_room(0);
    for number in 0..200 {
        rig.send(ping(number)).await;
    }
    rig.send(Frame::new(WINDOW_UPDATE, 0, 0, &[0; 4])).await;
    assert!(!rig.is_running() && !rig.is_closed());
    rig.peer.set_room(usize::MAX);
    rig.pump().await;
    assert!(rig.is_closed());
    let mut received = rig.peer.receive();
    assert_eq!(received.pop(), Some(Received::Alert([1, 0])));
    let Some(Received::Frame(last)) = received.pop() else {
        panic!("no GOAWAY");
    };
    assert_eq!((last.kind, last.number(4)), (GOAWAY, PROTOCOL_ERROR));
    let is_ack = |message: &Received| matches!(message, Received::Frame(it) if it.has(ACK));
    assert_eq!(received.len(), 200);
    assert!(received.iter().all(is_ack), "{received:?}");
}

#[tokio::test(start_paused = true)]
async fn records_without_bytes_use_the_credit_up() {
    let gateway = TestGateway::new();
    let update: &[u8] = &[24, 0, 0, 1, 0];
    for (kind, payload, count) in
        [(23, &[][..], 9_999), (21, &[1, 90], 9_999), (HANDSHAKE, update, 499)]
    {
        let mut rig = Rig::established(&gateway).await;
        frames(&mut rig);
        // The first SETTINGS cost 2 of 20,000, each of these records 2, and a KeyUpdate 40.
        for _ in 0..count {
            rig.peer.send_record(kind, payload);
        }
        rig.pump().await;
        assert!(rig.is_running() && rig.peer.is_read(), "type {kind}");
        rig.peer.send_record(kind, payload);
        rig.pump().await;
        let last = frames(&mut rig).pop().expect("GOAWAY");
        assert_eq!((last.kind, last.number(4)), (GOAWAY, ENHANCE_YOUR_CALM));
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_after_the_last_goaway_is_sent_too() {
    let mut rig = Rig::established(&TestGateway::new()).await;
    let _far = rig.tunnel(1).await;
    rig.connection().unwrap().downstream.server.shut_down_gracefully();
    rig.pump().await;
    rig.send(Frame::new(PING, ACK, 0, b"drained?")).await;
    rig.send(Frame::new(WINDOW_UPDATE, 0, 0, &[0; 4])).await;
    let frames = frames(&mut rig).into_iter();
    let goaways = frames.filter(|frame| frame.kind == GOAWAY);
    let goaways: Vec<_> = goaways.map(|it| (it.number(0), it.number(4))).collect();
    assert_eq!(goaways, [(u32::MAX >> 1, 0), (1, 0), (1, PROTOCOL_ERROR)]);
}

#[tokio::test(start_paused = true)]
async fn a_key_update_is_answered_once_the_peer_reads() {
    let mut rig = Rig::established(&TestGateway::new()).await;
    frames(&mut rig);
    rig.peer.set_room(0);
    rig.send(ping(1)).await;
    rig.peer.send_record(HANDSHAKE, &[24, 0, 0, 1, 1]);
    rig.pump().await;
    rig.peer.set_room(usize::MAX);
    rig.pump().await;
    assert_eq!(rig.peer.receive().pop(), Some(Received::KeyUpdate));
}

#[tokio::test(start_paused = true)]
async fn an_idle_stream_is_never_reset() {
    let gateway = TestGateway::new();
    let mut rig = Rig::established(&gateway).await;
    frames(&mut rig);
    // Stream 3 depends on itself.
    rig.send(Frame::new(PRIORITY, 0, 3, &[0, 0, 0, 3, 15])).await;
    assert_eq!(frames(&mut rig), []);
    rig.send(Frame::new(PRIORITY, 0, 3, &[0; 4])).await;
    let frames = frames(&mut rig);
    assert_eq!(kinds(&frames), [GOAWAY]);
    assert_eq!(frames[0].number(4), FRAME_SIZE_ERROR);
}

#[tokio::test(start_paused = true)]
async fn a_delivery_ends_soon_after_the_deadline_of_a_drain() {
    /// More than one delay after the deadline, and less than a delivery takes by itself.
    const SOON: Duration = Duration::from_millis(500);
    // FIN was sent, or a backlog is left.
    for (frames, reason) in [(0, "downstream_reset"), (16, "drain_deadline")] {
        let gateway = TestGateway::new();
        let mut rig = Rig::established(&gateway).await;
        rig.send(Frame::new(HEADERS, END_HEADERS, 1, CONNECT)).await;
        rig.accept(1).unwrap();
        let _far = rig.open(1, Some(4096)).unwrap();
        for _ in 0..frames {
            rig.send(Frame::new(DATA, 0, 1, &[7; 8 * 1024])).await;
        }
        rig.send(Frame::new(DATA, END_STREAM, 1, b"last")).await;
        let code = INTERNAL_ERROR.to_be_bytes();
        rig.send(Frame::new(RST_STREAM, 0, 1, &code)).await;
        let DataPath { lifecycle, metrics, .. } = &*gateway.data_path;
        assert_eq!(lifecycle.tasks(), 1, "{reason}");
        rig.identity.listener.drain.close();
        rig.pump().await;
        rig.wait(SOON).await;
        assert_eq!(lifecycle.tasks(), 0, "{reason}");
        let ended =
            format!("strait_tunnels_total{{reason=\"{reason}\",source_cluster=\"west\"}} 1");
        let text = metrics.encode();
        assert!(text.contains(&ended), "{reason}");
    }
}

/// Waits until the peer has received a frame of this kind.
async fn received(rig: &mut Rig, kind: u8) -> Frame {
    let received = async {
        loop {
            rig.pump().await;
            if let Some(frame) = frames(rig).into_iter().find(|frame| frame.kind == kind) {
                return frame;
            }
        }
    };
    timeout(DEADLINE, received).await.expect("a frame")
}

#[tokio::test]
async fn a_tunnel_whose_gateway_is_lost_after_the_end_of_the_endpoint_is_reset() {
    let (gateway, stream) = ended_tunnel().await;
    let mut rig = Rig::established(&TestGateway::new()).await;
    rig.tunnel_through(1, stream).await;
    assert!(received(&mut rig, DATA).await.has(END_STREAM));
    drop(gateway);
    assert_eq!(received(&mut rig, RST_STREAM).await.number(0), CONNECT_ERROR);
}

#[tokio::test(start_paused = true)]
async fn what_a_peer_sent_before_it_reset_the_connection_is_received() {
    let gateway = TestGateway::new();
    let mut rig = Rig::established(&gateway).await;
    let [mut ended, mut open] = [rig.tunnel(1).await, rig.tunnel(3).await];
    ended.shutdown(std::net::Shutdown::Write).expect("an open endpoint");
    rig.pump().await;
    let last = Frame::new(DATA, END_STREAM, 1, b"last").encode();
    rig.peer.reset_at_next_write(&last);
    fill(&mut open, b"more");
    rig.pump().await;
    assert!(!rig.is_running());
    let mut received = Vec::new();
    assert!(drain(&mut ended, &mut received), "a clean end");
    assert_eq!(received, b"last");
    let text = gateway.data_path.metrics.encode();
    for reason in ["completed", "downstream_lost"] {
        let ended =
            format!("strait_tunnels_total{{reason=\"{reason}\",source_cluster=\"west\"}} 1");
        assert!(text.contains(&ended), "{reason}");
    }
}
