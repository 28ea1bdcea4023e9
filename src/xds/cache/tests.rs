//! Tests of the cache: restoration, validation and the times of writes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use aws_lc_rs::digest::{SHA256, digest};
use prost::Message as _;

use super::*;
use crate::xds::client::{Mode, Response, Subscription};
use crate::xds::store::Store;
use crate::xds::tests::{policy, resource, workload};

fn cache(folder: &Path) -> Cache {
    Cache { file: folder.join("cache"), cluster: "east".into(), network: "net".into() }
}

fn client() -> Client {
    let wildcard = |type_url| Subscription { type_url, mode: Mode::Wildcard };
    Client::new([ADDRESS, AUTHORIZATION, CLUSTER].map(wildcard).into())
}

/// Returns a recorder with two workloads and an exported service.
fn filled(folder: &Path) -> Recorder {
    let mut recorder = Recorder::restore(cache(folder), Box::<Store>::default(), &mut client());
    recorder.upsert(ADDRESS, &workload("a", "1")).unwrap();
    recorder.upsert(ADDRESS, &workload("b", "2")).unwrap();
    let cluster = resource(CLUSTER, "inbound-vip|80|tcp|echo.app", "3", &());
    recorder.upsert(CLUSTER, &cluster).unwrap();
    recorder
}

fn write(recorder: &Recorder) -> io::Result<()> {
    recorder.save();
    let kept = recorder.kept.as_ref().unwrap();
    kept.file.write(&**kept).map(drop)
}

fn versions(client: &mut Client) -> Vec<(String, String)> {
    let requests = client.connected().into_iter();
    let versions = requests.flat_map(|request| request.initial_versions);
    versions.collect()
}

fn pair(name: &str, version: &str) -> (String, String) {
    (name.to_owned(), version.to_owned())
}

#[test]
fn what_was_accepted_is_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder = filled(folder.path());
    assert_eq!(recorder.restored, None);
    recorder.upsert(ADDRESS, &workload("c", "4")).unwrap();
    recorder.remove(ADDRESS, "c");
    let other = workload("b", "5");
    recorder.upsert("other", &other).unwrap_err();
    write(&recorder).unwrap();
    let path = folder.path().join("cache");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

    let mut client = client();
    let mut restored =
        Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut client);
    let (one, other) = (restored.store.tables(), recorder.store.tables());
    assert_eq!(one.mesh(), other.mesh());
    assert_eq!(one.take_exports(), other.take_exports());
    let notice = restored.restored.as_deref().unwrap();
    assert!(notice.contains(path.to_str().unwrap()), "{notice}");
    assert_eq!(
        versions(&mut client),
        [pair("a", "1"), pair("b", "2"), pair("inbound-vip|80|tcp|echo.app", "3")]
    );
    fs::remove_file(&path).unwrap();
    write(&restored).unwrap();
    assert!(!path.exists(), "nothing has changed");

    let gone = Response {
        type_url: ADDRESS.into(),
        nonce: "n".into(),
        removed: vec!["a".into()],
        ..Response::default()
    };
    client.received(gone, &mut restored);
    write(&restored).unwrap();
    let (_, header, resources) = file::read(&path).unwrap().unwrap();
    let cluster = resource(CLUSTER, "inbound-vip|80|tcp|echo.app", "3", &());
    // Of a cluster only the name is used.
    assert_eq!(resources, [cluster, workload("b", "2")]);
    assert_eq!(header.resources, 2);
}

#[test]
fn any_row_of_changes_and_writes_leaves_what_one_write_of_all_does() {
    let folder = tempfile::tempdir().unwrap();
    let (path, mut random) = (folder.path().join("file"), fastrand::Rng::with_seed(31));
    let (mut base, mut all) = (None, BTreeMap::new());
    for step in 0..300 {
        let mut changes: Changes = (0..random.usize(..5))
            .map(|_| {
                let key = ([ADDRESS, CLUSTER][random.usize(..2)], random.u8(..9).to_string());
                let entry = Entry { version: step.to_string(), ..Entry::default() }.encode();
                ((key.0, key.1.into()), random.bool().then_some(entry))
            })
            .collect();
        all.extend(changes.clone());
        all.retain(|_, entry| entry.is_some());
        base = Some(file::write(&path, Header::default(), base.as_ref(), &mut changes).unwrap());
        let merged = fs::read(&path).unwrap();
        file::write(&path, Header::default(), None, &mut all).unwrap();
        assert_eq!(merged, fs::read(&path).unwrap(), "step {step}");
    }
    assert!(!all.is_empty());
}

#[tokio::test]
async fn a_file_that_was_damaged_since_is_written_as_a_whole_once_all_was_sent_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, mut recorder) = (folder.path().join("cache"), filled(folder.path()));
    write(&recorder).unwrap();
    let mut bad = fs::read(&path).unwrap();
    *bad.last_mut().unwrap() ^= 1;
    // In place, as its writer reads it.
    fs::write(&path, &bad).unwrap();
    recorder.upsert(ADDRESS, &workload("c", "4")).unwrap();
    let error = write(&recorder).unwrap_err().to_string();
    assert_eq!(error, "the last file cannot be read: it is damaged: the checksum differs");
    write(&recorder).unwrap();
    recorder.lost().await;
    for (name, version) in [("a", "1"), ("b", "2")] {
        recorder.upsert(ADDRESS, &workload(name, version)).unwrap();
        let kept = recorder.kept.as_ref().unwrap();
        assert_eq!(kept.file.write(&**kept).unwrap(), None, "more is to come");
    }
    assert_eq!(fs::read(&path).unwrap(), bad);
    write(&recorder).unwrap();
    let (_, _, resources) = file::read(&path).unwrap().unwrap();
    assert_eq!(resources, [workload("a", "1"), workload("b", "2")]);
    recorder.remove(ADDRESS, "a");
    write(&recorder).unwrap();
    let (_, header, _) = file::read(&path).unwrap().unwrap();
    assert_eq!(header.resources, 1);
}

#[test]
fn removals_of_what_the_file_lacks_are_bounded_while_writes_fail() {
    for has_file in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = filled(folder.path());
        let kept = Arc::clone(recorder.kept.as_ref().unwrap());
        for number in 0..10 {
            recorder.remove(ADDRESS, &number.to_string());
        }
        assert_eq!(kept.state().changes.len(), 3, "nothing was written");
        if has_file {
            write(&recorder).unwrap();
        }
        let in_the_way = folder.path().join(format!("cache.new.{}", std::process::id()));
        fs::create_dir(&in_the_way).unwrap();
        recorder.remove(ADDRESS, "a");
        for number in 0..100 {
            let name = number.to_string();
            recorder.upsert(ADDRESS, &workload(&name, "1")).unwrap();
            recorder.remove(ADDRESS, &name);
            write(&recorder).unwrap_err();
            assert_eq!(kept.state().changes.len(), if has_file { 1 } else { 2 });
        }
        fs::remove_dir(&in_the_way).unwrap();
        write(&recorder).unwrap();
        let (_, _, resources) = file::read(&folder.path().join("cache")).unwrap().unwrap();
        assert_eq!(resources.len(), 2, "one was removed");
    }
}

#[test]
fn the_placeholder_of_a_policy_outlives_a_restart_and_is_requested_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder = filled(folder.path());
    recorder.upsert(AUTHORIZATION, &policy(0, 65536, "6")).unwrap_err();
    write(&recorder).unwrap();
    let mut client = client();
    let mut restored =
        Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut client);
    assert!(restored.store.has_placeholder(AUTHORIZATION, "app/p"));
    assert!(versions(&mut client).contains(&pair("app/p", "")));
    restored.upsert(AUTHORIZATION, &policy(0, 80, "7")).unwrap();
    restored.upsert(AUTHORIZATION, &policy(0, 65536, "8")).unwrap_err();
    write(&restored).unwrap();
    let mut client = self::client();
    let restored = Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut client);
    assert!(!restored.store.has_placeholder(AUTHORIZATION, "app/p"));
    assert!(versions(&mut client).contains(&pair("app/p", "7")));
}

#[test]
fn the_bodies_of_unreadable_policies_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder =
        Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut client());
    let kept = Arc::clone(recorder.kept.as_ref().unwrap());
    let mut put = |name: &str, bytes: usize| {
        let unreadable = Resource {
            name: name.into(),
            body: Some(vec![0xff; bytes].into()),
            ..policy(0, 80, "1")
        };
        recorder.upsert(AUTHORIZATION, &unreadable).unwrap_err();
        let state = kept.state();
        let entry = state.changes[&(AUTHORIZATION, name.into())].as_ref().unwrap();
        (entry.len() > bytes.min(BODY_BYTES_MAX), state.unreadable_bytes)
    };
    assert_eq!(put("app/long", BODY_BYTES_MAX + 1), (false, 0));
    assert_eq!(put("app/p", 10), (true, 10));
    assert_eq!(put("app/p", 20), (true, 20), "in place of the other");
    for index in 1..UNREADABLE_BYTES_MAX / BODY_BYTES_MAX {
        assert!(put(&format!("app/{index}"), BODY_BYTES_MAX).0);
    }
    let full = UNREADABLE_BYTES_MAX - BODY_BYTES_MAX + 20;
    assert_eq!(put("app/more", BODY_BYTES_MAX), (false, full));
    recorder.upsert(AUTHORIZATION, &policy(0, 80, "2")).unwrap();
    assert_eq!(kept.state().unreadable_bytes, full - 20);
    recorder.remove(AUTHORIZATION, "app/1");
    assert_eq!(kept.state().unreadable_bytes, full - 20 - BODY_BYTES_MAX);
}

#[test]
fn a_slow_write_is_followed_by_a_long_pause() {
    let millis = Duration::from_millis;
    for (took, wait) in [(1, 5_000), (200, 10_000), (1_000, 50_000), (9_000, 60_000)] {
        assert_eq!(pause(millis(took)), millis(wait));
    }
}

#[test]
fn the_placeholder_of_policies_beyond_the_limit_outlives_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder = filled(folder.path());
    assert!(recorder.handle_rejection(AUTHORIZATION, SHARED_PLACEHOLDER));
    write(&recorder).unwrap();
    let mut client = client();
    let mut restored =
        Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut client);
    assert!(restored.store.has_placeholder(AUTHORIZATION, SHARED_PLACEHOLDER));
    assert_eq!(client.held(AUTHORIZATION), 0);
    versions(&mut client);
    // The first response of a stream has no nonce.
    let response = Response { type_url: AUTHORIZATION.into(), ..Response::default() };
    client.received(response, &mut restored);
    write(&restored).unwrap();
    for recorder in [
        restored,
        Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut self::client()),
    ] {
        assert!(!recorder.store.has_placeholder(AUTHORIZATION, SHARED_PLACEHOLDER));
    }
}

#[test]
fn a_file_that_cannot_be_used_is_refused_by_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    write(&filled(folder.path())).unwrap();
    let path = folder.path().join("cache");
    let good = fs::read(&path).unwrap();
    let why = |bytes: &[u8]| file::parse(&Bytes::copy_from_slice(bytes)).unwrap_err();
    for end in 0..good.len() {
        let why = why(&good[..end]);
        assert!(why.contains("too short") || why.contains("cut off"), "{why}");
    }
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        let want = match at {
            0..8 => "it is not a state file of Strait",
            8..12 => "this build reads 1",
            12..20 => "after its head",
            _ => "it is damaged",
        };
        assert!(why(&bytes).contains(want), "{at}: {}", why(&bytes));
    }
    assert!(why(&[&*good, b"x"].concat()).contains("too long"));
    let mut newer = good;
    newer[8] = 2;
    assert_eq!(why(&newer), "it has format 2, this build reads 1");

    // Well-formed content with wrong numbers.
    let framed = |resources, entries: &[u8]| {
        let header = Header { resources, ..Header::default() }.encode_length_delimited_to_vec();
        let length = (header.len() + entries.len()) as u64;
        let head = [b"\xf5strait\n\x01\0\0\0", &length.to_le_bytes()[..]].concat();
        let summed = [&*head, &header, entries].concat();
        [&*summed, digest(&SHA256, &summed).as_ref()].concat()
    };
    for (resources, entries, want) in [
        (1, &b"\x02\x7f\x01"[..], "it cannot be decoded"),
        (1, b"\x02", "it cannot be decoded: an entry is cut off"),
        (2, b"\0", "it cannot be decoded"),
        (0, b"\0", "1 bytes follow its last resource"),
        (1 << 40, b"", "more than 1000000 resources"),
    ] {
        let why = why(&framed(resources, entries));
        assert!(why.contains(want), "{why}");
    }
    fs::write(&path, framed(2, b"\x03\x12\x01b\x03\x12\x01a")).unwrap();
    let unsorted = File::open(&path).unwrap();
    let error = file::write(&path, Header::default(), Some(&unsorted), &mut Changes::new());
    let want = "the last file cannot be read: its entries are not in order";
    assert_eq!(error.unwrap_err().to_string(), want);
    assert_eq!(file::read(folder.path()).unwrap_err(), "it is not a file");
    assert!(file::read(&folder.path().join("none")).unwrap().is_none());
}

#[test]
fn the_state_of_another_cluster_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    write(&filled(folder.path())).unwrap();
    let other = Cache { cluster: "west".into(), ..cache(folder.path()) };
    let mut client = client();
    let restored = Recorder::restore(other, Box::<Store>::default(), &mut client);
    assert_eq!(restored.restored, None);
    assert_eq!(versions(&mut client), []);
}

#[test]
fn a_write_that_fails_leaves_the_old_file_and_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut recorder = filled(folder.path());
    write(&recorder).unwrap();
    let path = folder.path().join("cache");
    let old = fs::read(&path).unwrap();
    let in_the_way = folder.path().join(format!("cache.new.{}", std::process::id()));
    fs::create_dir(&in_the_way).unwrap();
    recorder.upsert(ADDRESS, &workload("c", "4")).unwrap();
    write(&recorder).unwrap_err();
    assert_eq!(fs::read(&path).unwrap(), old);
    fs::remove_dir(&in_the_way).unwrap();
    // Remains of a process that was killed.
    fs::write(&in_the_way, "half").unwrap();
    write(&recorder).unwrap();
    assert_ne!(fs::read(&path).unwrap(), old);
    assert!(!in_the_way.exists());
    folder.close().unwrap();
    recorder.remove(ADDRESS, "c");
    let error = write(&recorder).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test(start_paused = true)]
async fn the_file_follows_in_five_seconds_and_is_written_no_more_often() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let mut recorder = filled(folder.path());
    let writing = tokio::spawn(recorder.writer(drop));
    let mut writes = 0;
    for second in 0..30 {
        let version = format!("v{second}");
        recorder.upsert(ADDRESS, &workload("a", &version)).unwrap();
        recorder.save();
        // deadline: the clock is paused.
        tokio::time::sleep(Duration::from_secs(1)).await;
        writes += usize::from(fs::remove_file(&path).is_ok());
    }
    assert!((5..=7).contains(&writes), "{writes}");
    // deadline: the clock is paused.
    tokio::time::sleep(EVERY_MIN + Duration::from_millis(10)).await;
    let (_, _, resources) = file::read(&path).unwrap().unwrap();
    let a = resources.iter().find(|one| *one.name == *"a").unwrap();
    assert_eq!(*a.version, *"v29");
    fs::remove_file(&path).unwrap();
    recorder.save();
    // deadline: the clock is paused.
    tokio::time::sleep(EVERY_MIN * 3).await;
    assert!(!path.exists(), "nothing has changed");
    writing.abort();
}

#[test]
fn what_is_new_on_a_stream_is_not_saved_before_its_policies() {
    let folder = tempfile::tempdir().unwrap();
    write(&filled(folder.path())).unwrap();
    let saved = || {
        let (_, _, resources) = file::read(&folder.path().join("cache")).unwrap().unwrap();
        resources.len()
    };
    let mut client = client();
    let mut recorder =
        Recorder::restore(cache(folder.path()), Box::<Store>::default(), &mut client);
    recorder.set_policies_received();
    client.connected();
    recorder.connected();
    let response = |type_url: &str, resources| Response {
        type_url: type_url.into(),
        nonce: "n".into(),
        resources,
        ..Response::default()
    };
    client.received(response(ADDRESS, vec![workload("c", "4")]), &mut recorder);
    write(&recorder).unwrap();
    assert_eq!(saved(), 3);
    client.received(response(AUTHORIZATION, vec![policy(0, 80, "5")]), &mut recorder);
    recorder.set_policies_received();
    write(&recorder).unwrap();
    assert_eq!(saved(), 5);
}
