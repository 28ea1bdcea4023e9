//! The recorder of a real istiod, between a gateway and the istiod of the tests.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use prost::Message as _;
use rcgen::SanType;
use strait::grpc::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use strait::xds::store::ADDRESS;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::istio;
use crate::istiod_recordings::recording::{Kind, read};
use crate::peers::{PYTHON, exists};
use crate::support::istiod::{Istiod, NAME, TOKEN};
use crate::support::wds::{SERVICE, bytes, changed, service};
use crate::support::{DEADLINE, Net, Settings, identities, run, until};

const RECORD_PY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/istiod/record.py");

/// Writes the recorder's certificate, which has istiod's name, and the root of istiod's.
fn write_certificates(folder: &Path) {
    let leaf = identities().east.leaf_with(|parameters| {
        let name = NAME.try_into().expect("a name");
        parameters.subject_alt_names = vec![SanType::DnsName(name)];
    });
    let leaf = leaf.expect("a leaf");
    for (name, text) in
        [("tls.crt", &leaf.chain_pem), ("tls.key", &leaf.key_pem), ("root.crt", &identities().root)]
    {
        std::fs::write(folder.join(name), text).expect("a file");
    }
}

/// Starts the recorder of an istiod.
fn spawn_recorder(folder: &Path, listen: SocketAddr, istiod: SocketAddr) -> Child {
    Command::new(PYTHON)
        .arg(RECORD_PY)
        .args(["--listen", &listen.to_string()])
        .args(["--istiod", &istiod.to_string()])
        .args(["--certificate", "tls.crt", "--key", "tls.key"])
        .args(["--root", "root.crt"])
        .args(["--about", "istiod: that of the tests", "recording.txt"])
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("Python")
}

#[test]
fn a_secret_written_as_hex_or_base64_ends_the_recording() {
    let test = "a_secret_written_as_hex_or_base64_ends_the_recording";
    run(async {
        if !exists(PYTHON, test, "type `make strict-client`") {
            return;
        }
        let net = Net::new();
        let folder = tempfile::tempdir().expect("a folder");
        write_certificates(folder.path());
        // `PRIVATE KEY` and `Bearer `, at different offsets.
        for (host, mark) in [
            (2, "harmless 0a580165fd9600000000000000000000000ee8d9"),
            (3, "x50524956415445204b4559"),
            (4, "UFJJVkFURSBLRVk="),
            (5, "/eEJlYXJlciA"),
            (6, "eHhCZWFyZXIg"),
        ] {
            let (listen, istiod) = (net.address(host, 15012), net.address(host, 15013));
            let mut recorder = spawn_recorder(folder.path(), listen, istiod);
            let mut marks = recorder.stdin.take().expect("a pipe");
            marks.write_all(format!("{mark}\n").as_bytes()).await.expect("a mark");
            drop(marks);
            let ended = timeout(DEADLINE, recorder.wait()).await.expect("in time");
            assert_eq!(ended.expect("an end").success(), host == 2, "{mark}");
        }
    });
}

#[test]
fn a_recording_has_every_message_and_no_token() {
    let test = "a_recording_has_every_message_and_no_token";
    run(async {
        if !exists(PYTHON, test, "type `make strict-client`") {
            return;
        }
        let net = Net::new();
        let folder = tempfile::tempdir().expect("a folder");
        write_certificates(folder.path());
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        let upstream = net.address(3, 15012);
        let _serving = istiod.serve(upstream, identities()).await;
        let mut recorder = spawn_recorder(folder.path(), net.address(2, 15012), upstream);
        let mut marks = recorder.stdin.take().expect("a pipe");
        let mut lines = BufReader::new(recorder.stdout.take().expect("a pipe")).lines();
        let line = lines.next_line().await.expect("a line");
        assert_eq!(line.as_deref(), Some("listening"));

        let mut gateway = istio::spawn_with(&Settings::new(net, identities()), NAME, |_| {});
        gateway.ready().await;
        istiod.put(ADDRESS, "a", &changed("a", bytes(net.ip(11)), |_| ()));
        // Three subscriptions, their answers, and those to clusters and addresses of the push.
        until("requests", async || istiod.requests().len(), |&count| count == 8).await;
        marks.write_all(b"the end\n").await.expect("a mark");
        let line = lines.next_line().await.expect("a line");
        assert_eq!(line.as_deref(), Some("marked"));
        drop(marks);
        assert!(recorder.wait().await.expect("an end").success());

        let path = folder.path().join("recording.txt");
        let text = std::fs::read_to_string(&path).expect("a recording");
        assert!(text.starts_with("# istiod: that of the tests\n"), "{text}");
        assert!(!text.contains(TOKEN), "{text}");
        let (mut requests, mut responses, mut marks) = (Vec::new(), Vec::new(), Vec::new());
        for event in read(&path) {
            match event.kind {
                Kind::Request(_, message) => {
                    requests.push(DeltaDiscoveryRequest::decode(&*message).expect("a request"));
                }
                Kind::Response(_, message) => {
                    responses.push(DeltaDiscoveryResponse::decode(&*message).expect("a response"));
                }
                Kind::Mark(text) => marks.push(text),
                _ => {}
            }
        }
        assert_eq!(requests, istiod.requests());
        assert_eq!(marks, ["the end"]);
        let names = responses.iter().flat_map(|response| &response.resources);
        let names: Vec<_> = names.map(|resource| &*resource.name).collect();
        assert!(names.contains(&SERVICE) && names.contains(&"a"), "{names:?}");
    });
}
