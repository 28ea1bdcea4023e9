//! Cache of the issued key and chain on disk, for a restart while the authority is unreachable.
//!
//! It is one file, replaced as a whole, in a directory that only this user may enter. A file is
//! valid for the identity that it was issued for, until the certificate expires. The roots by
//! which the authority was verified must also still be trusted.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, bail, ensure};
use aws_lc_rs::digest::{SHA256, digest};
use rustix::process::geteuid;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::{
    DEADLINE, Expired, bad_pem, material_from_answer, parse_certificates, require_identity,
};
use crate::config::Roots;
use crate::replace_file::replace_file;
use crate::tls::IdentityMaterial;

/// Name of the file in the directory.
const FILE: &str = "identity.json";
/// Format version that this build writes, and the only one that it reads.
const FORMAT: u32 = 1;
/// Limit of the file's size: an authority's answer and a key.
const FILE_BYTES_MAX: u64 = 2 << 20;
/// Interval at which the file is removed if its certificate has expired.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(15);
const GROUP_AND_OTHERS: u32 = 0o077;
/// Name of the system's roots in [`CacheFile::authority`].
const SYSTEM: &str = "SYSTEM";
/// The same without TLS, where nothing verifies the authority.
const PLAINTEXT: &str = "PLAINTEXT";

/// Directory for the key and chain of one identity.
#[derive(Clone, Debug)]
pub struct Cache {
    /// The directory, created if it does not exist.
    directory: PathBuf,
    /// SPIFFE ID that the certificate must have.
    id: String,
    roots: Roots,
    /// Permit of the one access to the disk.
    free: Arc<Semaphore>,
}

fn is_expiry(error: &anyhow::Error) -> bool {
    error.is::<Expired>()
}

#[derive(Serialize, Deserialize)]
struct CacheFile {
    format: u32,
    /// SHA-256 digests of the roots by which the authority was verified.
    authority: BTreeSet<String>,
    key: String,
    chain: String,
    roots: String,
}

impl Cache {
    pub fn new(directory: PathBuf, id: String, roots: Roots) -> Self {
        Self { directory, id, roots, free: Arc::new(Semaphore::new(1)) }
    }

    /// Accesses the disk on a blocking thread, with a deadline. Returns `None` without an answer in
    /// time. A disk that hangs keeps one thread, because one access runs at a time.
    pub(super) async fn on_disk<T: Send + 'static>(
        &self,
        access: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        let free = Arc::clone(&self.free).acquire_owned();
        let permit = timeout(DEADLINE, free).await.ok()?.ok()?;
        let cache = self.clone();
        let access = spawn_blocking(move || {
            let _permit = permit;
            access(&cache)
        });
        let Ok(done) = timeout(DEADLINE, access).await else {
            warn!("access to the certificate on disk timed out");
            return None;
        };
        done.ok()
    }

    /// Loads the cached certificate as [`Self::load`], if the disk answers in time.
    pub(super) async fn load_in_time(&self) -> Option<anyhow::Result<Option<IdentityMaterial>>> {
        self.on_disk(|cache| cache.load(SystemTime::now())).await
    }

    /// Removes the certificate with its key whenever it has expired. An expired one remains if the
    /// authority fails, or if later ones cannot be stored. Never returns.
    pub(super) async fn remove_expired(&self) {
        loop {
            sleep(EXPIRY_INTERVAL).await;
            if let Some(Err(error)) = self.load_in_time().await
                && is_expiry(&error)
            {
                info!(%error, "the certificate on disk is removed");
            }
        }
    }

    /// Loads the cached certificate, or returns `None` if there is none. Removes an expired
    /// certificate with its key. Any other rejected file remains until [`store`](Self::store)
    /// replaces it.
    ///
    /// # Errors
    /// The directory or the file is not private, or the file is unreadable or not valid.
    pub fn load(&self, now: SystemTime) -> anyhow::Result<Option<IdentityMaterial>> {
        let Some(metadata) =
            not_found_as_none(fs::symlink_metadata(&self.directory), &self.directory)?
        else {
            return Ok(None);
        };
        self.check_folder(&metadata)?;
        let path = self.directory.join(FILE);
        let Some(file) = not_found_as_none(File::open(&path), &path)? else {
            return Ok(None);
        };
        let io = |error| failed(&path, error);
        check_private(&path, &file.metadata().map_err(io)?)?;
        let mut bytes = Vec::new();
        let read = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(io)?;
        let saved: CacheFile =
            serde_json::from_slice(&bytes).map_err(|error| damaged(&path, &error))?;
        if saved.format != FORMAT {
            let why = format!("format {}, this build reads {FORMAT}", saved.format);
            return Err(damaged(&path, &why));
        }
        let material = self.material(&saved, now).map_err(|error| {
            let why = format!("`identity.cache`: {}: {error}", path.display());
            error.context(why)
        });
        if material.as_ref().is_err_and(is_expiry) {
            fs::remove_file(&path).map_err(io)?;
        }
        let material = material?;
        ensure!(
            saved.authority.is_subset(&root_digests(&self.roots)?),
            "`identity.cache`: {} was issued by an authority below a root that `identity.roots` \
             no longer contains",
            path.display()
        );
        Ok(Some(material))
    }

    fn material(&self, saved: &CacheFile, now: SystemTime) -> anyhow::Result<IdentityMaterial> {
        let key = PrivateKeyDer::from_pem_slice(saved.key.as_bytes()).map_err(bad_pem)?;
        let (chain, roots) = (&saved.chain, &saved.roots);
        let (chain, roots) = (parse_certificates(chain)?, parse_certificates(roots)?);
        let material = material_from_answer(chain, key, roots, now)?;
        require_identity(&material, &self.id)?;
        Ok(material)
    }

    /// Stores a certificate with its key, and replaces the previous one.
    ///
    /// # Errors
    /// The directory is not private, or cannot be written.
    pub fn store(&self, material: &IdentityMaterial) -> anyhow::Result<()> {
        let made = DirBuilder::new().mode(0o700).create(&self.directory);
        if let Err(error) = made
            && error.kind() != ErrorKind::AlreadyExists
        {
            return Err(failed(&self.directory, error));
        }
        let metadata = fs::symlink_metadata(&self.directory);
        self.check_folder(&metadata.map_err(|error| failed(&self.directory, error))?)?;
        let saved = CacheFile {
            format: FORMAT,
            authority: root_digests(&self.roots)?,
            key: pem("PRIVATE KEY", material.key.secret_der()),
            chain: pems(&material.chain),
            roots: pems(&material.root_certificates),
        };
        let path = self.directory.join(FILE);
        let bytes = serde_json::to_vec(&saved).map_err(|error| damaged(&path, &error))?;
        let fill = |mut file: File| file.write_all(&bytes).map(|()| file);
        replace_file(&path, fill).map(drop).map_err(|error| failed(&path, error))
    }

    fn check_folder(&self, metadata: &Metadata) -> anyhow::Result<()> {
        if metadata.is_dir() {
            check_private(&self.directory, metadata)
        } else {
            Err(failed(&self.directory, ErrorKind::NotADirectory.into()))
        }
    }
}

/// Returns `None` if the path does not exist.
fn not_found_as_none<T>(found: io::Result<T>, path: &Path) -> anyhow::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some).map_err(|error| failed(path, error)),
    }
}

/// Checks that a directory or file belongs to this user, with no access for others.
fn check_private(path: &Path, metadata: &Metadata) -> anyhow::Result<()> {
    let (owner, own) = (metadata.uid(), geteuid().as_raw());
    let mode = metadata.mode() & 0o777;
    let why = if owner != own {
        format!("it belongs to user {owner} and this is user {own}")
    } else if mode & GROUP_AND_OTHERS != 0 {
        format!("its mode is {mode:04o}")
    } else {
        return Ok(());
    };
    bail!(
        "`identity.cache`: {} is accessible to other users: {why}; use a directory of this \
         user with mode 0700, or a path that does not exist",
        path.display()
    );
}

fn failed(path: &Path, error: io::Error) -> anyhow::Error {
    anyhow!("`identity.cache`: {} cannot be used: {error}", path.display())
}

fn damaged(path: &Path, why: &impl Display) -> anyhow::Error {
    anyhow!("`identity.cache`: {} cannot be read: {why}", path.display())
}

fn root_digests(roots: &Roots) -> anyhow::Result<BTreeSet<String>> {
    let unreadable = |why: &dyn Display| {
        anyhow!("`identity.cache`: the roots of the authority cannot be read: {why}")
    };
    let read = match roots {
        Roots::File(file) => fs::read(file)
            .map_err(|error| unreadable(&format_args!("{}: {error}", file.display())))?,
        Roots::Pem(text) => text.clone().into_bytes(),
        Roots::System => return Ok(BTreeSet::from([SYSTEM.to_owned()])),
        Roots::Plaintext => return Ok(BTreeSet::from([PLAINTEXT.to_owned()])),
    };
    let digest_of = |certificate: CertificateDer<'_>| {
        let sum = digest(&SHA256, &certificate);
        sum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let certificates = CertificateDer::pem_slice_iter(&read);
    let digests = certificates.map(|certificate| Ok(digest_of(certificate?)));
    let digests: Result<_, rustls::pki_types::pem::Error> = digests.collect();
    digests.map_err(|error| unreadable(&error))
}

fn pem(tag: &str, der: &[u8]) -> String {
    ::pem::encode(&::pem::Pem::new(tag, der))
}

fn pems(certificates: &[CertificateDer<'_>]) -> String {
    certificates.iter().map(|one| pem("CERTIFICATE", one)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::advance;

    use super::*;
    use crate::tls::tests::samples::{self, leaf_between};
    use crate::tools::dev::Issuer;

    const ID: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    struct Fixture {
        folder: tempfile::TempDir,
        root: String,
        issuer: Issuer,
    }

    impl Fixture {
        fn new() -> Self {
            let authority = samples::authority();
            Self {
                folder: tempfile::tempdir().unwrap(),
                root: authority.root_pem(),
                issuer: samples::intermediate(&authority, "east"),
            }
        }

        fn cache(&self) -> Cache {
            let directory = self.folder.path().join("identity");
            Cache::new(directory, ID.to_owned(), Roots::Pem(self.root.clone()))
        }

        fn material(&self) -> IdentityMaterial {
            let now = SystemTime::now();
            samples::material(&leaf_between(&self.issuer, ID, now - DAY, now + DAY), &self.root)
        }

        fn stored(&self) -> Cache {
            let cache = self.cache();
            cache.store(&self.material()).unwrap();
            cache
        }
    }

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o777
    }

    fn refused(cache: &Cache, now: SystemTime) -> String {
        cache.load(now).expect_err("a refusal").to_string()
    }

    /// Replaces the file by a pipe, like a mount that hangs: it hangs until the pipe is written.
    fn hang(cache: &Cache) -> PathBuf {
        let file = cache.directory.join(FILE);
        fs::remove_file(&file).unwrap();
        let made = std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&file).status();
        assert!(made.unwrap().success());
        file
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_keeps_one_thread_however_often_it_is_accessed() {
        let fixture = Fixture::new();
        let cache = fixture.stored();
        let file = hang(&cache);
        let runs = Arc::new(AtomicUsize::new(0));
        let access = || {
            let runs = Arc::clone(&runs);
            cache.on_disk(move |cache| {
                runs.fetch_add(1, Ordering::Relaxed);
                cache.load(SystemTime::now()).is_ok()
            })
        };
        // A running blocking task keeps the paused clock from advancing by itself.
        let (first, second, ()) = tokio::join!(access(), access(), advance(2 * DEADLINE));
        assert_eq!((first, second), (None, None));
        assert_eq!(cache.free.available_permits(), 0);
        // Waits for the reader.
        fs::write(&file, "no certificate").unwrap();
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        fs::remove_file(file).unwrap();
        assert_eq!(access().await, Some(true), "the disk is used again");
    }

    #[test]
    fn a_key_is_kept_in_a_closed_directory_and_read_with_its_chain() {
        let fixture = Fixture::new();
        let cache = fixture.cache();
        assert!(cache.load(SystemTime::now()).unwrap().is_none());
        let material = fixture.material();
        cache.store(&material).unwrap();
        let file = cache.directory.join(FILE);
        assert_eq!((mode(&cache.directory), mode(&file)), (0o700, 0o600));
        let read = cache.load(SystemTime::now()).unwrap().expect("a certificate");
        assert_eq!(read.chain, material.chain);
        assert_eq!(read.root_certificates, material.root_certificates);
        assert_eq!(read.key.secret_der(), material.key.secret_der());

        let next = fixture.material();
        cache.store(&next).unwrap();
        let read = cache.load(SystemTime::now()).unwrap().expect("the next one");
        assert_eq!(read.chain, next.chain);
        let names = fs::read_dir(&cache.directory).unwrap().count();
        assert_eq!(names, 1, "no other file is left");
    }

    #[test]
    fn a_directory_or_a_file_that_is_open_to_others_is_refused() {
        let fixture = Fixture::new();
        let cache = fixture.stored();
        let file = cache.directory.join(FILE);
        let open = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        for (path, wrong, right) in [(&cache.directory, 0o755, 0o700), (&file, 0o640, 0o600)] {
            open(path, wrong);
            let why = refused(&cache, SystemTime::now());
            assert!(why.contains(&format!("its mode is {wrong:04o}")), "{why}");
            assert!(why.contains(&*path.to_string_lossy()), "{why}");
            open(path, right);
        }
        open(&cache.directory, 0o770);
        let why = cache.store(&fixture.material()).expect_err("a refusal");
        assert!(why.to_string().contains("mode is 0770"), "{why}");
        open(&cache.directory, 0o700);
        let link = fixture.folder.path().join("link");
        symlink(&cache.directory, &link).unwrap();
        let linked = Cache { directory: link, ..cache.clone() };
        assert!(refused(&linked, SystemTime::now()).contains("not a directory"));
        assert!(cache.load(SystemTime::now()).unwrap().is_some());
    }

    #[test]
    fn a_certificate_that_has_expired_is_removed_with_its_key() {
        let fixture = Fixture::new();
        let cache = fixture.stored();
        let why = refused(&cache, SystemTime::now() + 2 * DAY);
        assert!(why.contains("the certificate expired"), "{why}");
        assert!(!cache.directory.join(FILE).exists());
        assert!(cache.load(SystemTime::now()).unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_certificate_is_removed_though_no_later_one_can_be_stored() {
        let fixture = Fixture::new();
        let cache = fixture.cache();
        let now = SystemTime::now();
        let expired = leaf_between(&fixture.issuer, ID, now - 2 * DAY, now - DAY);
        cache.store(&samples::material(&expired, &fixture.root)).unwrap();
        let file = cache.directory.join(FILE);
        let removed = timeout(2 * EXPIRY_INTERVAL, cache.remove_expired());
        assert!(removed.await.is_err() && !file.exists(), "removed within the interval");
        // One that is valid stays.
        cache.store(&fixture.material()).unwrap();
        assert!(timeout(2 * EXPIRY_INTERVAL, cache.remove_expired()).await.is_err());
        assert!(file.exists());
    }

    #[test]
    fn another_identity_or_a_root_that_was_taken_back_is_refused() {
        let fixture = Fixture::new();
        let stored = fixture.stored();
        let other = Cache { id: ID.replace("eastwest", "other"), ..stored.clone() };
        assert!(refused(&other, SystemTime::now()).contains("other: the authority signs"));
        let next = samples::authority().root_pem();
        let with_roots =
            |roots: &str| Cache { roots: Roots::Pem(roots.to_owned()), ..stored.clone() };
        let why = refused(&with_roots(&next), SystemTime::now());
        assert!(why.contains("no longer contains"), "{why}");
        let both = with_roots(&(next + &fixture.root));
        assert!(both.load(SystemTime::now()).unwrap().is_some());
        let absent = Cache { roots: Roots::File("/no/such".into()), ..stored };
        assert!(refused(&absent, SystemTime::now()).contains("/no/such: No such file"));
    }

    #[test]
    fn a_certificate_obtained_without_tls_is_refused_under_the_systems_roots() {
        let fixture = Fixture::new();
        let with = |roots| Cache { roots, ..fixture.cache() };
        let (plaintext, system) = (with(Roots::Plaintext), with(Roots::System));
        plaintext.store(&fixture.material()).unwrap();
        assert!(plaintext.load(SystemTime::now()).unwrap().is_some());
        refused(&system, SystemTime::now());
    }

    #[test]
    fn a_file_that_is_damaged_or_of_another_format_is_refused() {
        let fixture = Fixture::new();
        let cache = fixture.stored();
        let file = cache.directory.join(FILE);
        let good = fs::read_to_string(&file).unwrap();
        let other = fixture.material();
        let other = serde_json::to_string(&pem("PRIVATE KEY", other.key.secret_der())).unwrap();
        let own: CacheFile = serde_json::from_str(&good).unwrap();
        let own = serde_json::to_string(&own.key).unwrap();
        for (text, why) in [
            (good[..good.len() / 2].to_owned(), "cannot be read: EOF"),
            (good.replace("\"format\":1", "\"format\":2"), "format 2"),
            (good.replace(&own, &other), "does not match the certificate"),
        ] {
            fs::write(&file, text).unwrap();
            let reported = refused(&cache, SystemTime::now());
            assert!(reported.contains(why), "{reported}");
        }
    }
}
